// AVX-512 intrinsics of the kernels in plain C++, so that tests run them on any CPU.
//
// A masked load or store touches the lanes of its mask only, as the instruction does: sanitizers see
// every access that is out of bounds.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define EMULATED(size) __attribute__((vector_size(size), may_alias))
typedef float __m512 EMULATED(64);
typedef long long __m512i EMULATED(64);
typedef uint16_t __m512bh EMULATED(64);
typedef long long __m256i EMULATED(32);
typedef uint16_t __m256bh EMULATED(32);
typedef long long __m128i EMULATED(16);
typedef uint16_t __mmask16;
typedef uint8_t __mmask8;

#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
enum { _CMP_EQ_OQ, _CMP_UNORD_Q, _CMP_GE_OQ, _CMP_GT_OQ };

namespace emulated {

template <class T, int BYTES> struct Lanes {
    static constexpr int COUNT = BYTES / sizeof(T);
    T at[COUNT];
};

template <class T, class V> Lanes<T, sizeof(V)> lanes(const V& v) {
    Lanes<T, sizeof(V)> x;
    std::memcpy(&x, &v, sizeof(V));
    return x;
}

template <class V, class T, int BYTES> V vector(const Lanes<T, BYTES>& x) {
    static_assert(sizeof(V) == BYTES);
    V v;
    std::memcpy(&v, &x, BYTES);
    return v;
}

template <class T, class V, class F> V each(F f) {
    Lanes<T, sizeof(V)> x;
    for (int i = 0; i < x.COUNT; i++) x.at[i] = f(i);
    return vector<V>(x);
}

template <class V> V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}

template <class T, class V> V masked_load(const V& otherwise, uint32_t mask, const void* from) {
    const auto old = lanes<T>(otherwise);
    return each<T, V>([&](int i) {
        T x = old.at[i];
        if (mask >> i & 1) std::memcpy(&x, (const char*)from + i * sizeof(T), sizeof(T));
        return x;
    });
}

template <class T, class V> void masked_store(void* to, uint32_t mask, const V& v) {
    const auto x = lanes<T>(v);
    for (int i = 0; i < x.COUNT; i++)
        if (mask >> i & 1) std::memcpy((char*)to + i * sizeof(T), &x.at[i], sizeof(T));
}

// Lane i of the result is f(lane i of a, lane i of b).
template <class T, class V, class F> V map(const V& a, const V& b, F f) {
    const auto x = lanes<T>(a), y = lanes<T>(b);
    return each<T, V>([&](int i) { return T(f(x.at[i], y.at[i])); });
}

// Interleave the lower or upper halves of each 128 bits.
template <class T, class V> V unpack(const V& a, const V& b, bool high) {
    constexpr int PER = 16 / sizeof(T);
    const auto x = lanes<T>(a), y = lanes<T>(b);
    return each<T, V>([&](int i) {
        const int from = i / PER * PER + (high ? PER / 2 : 0) + i % PER / 2;
        return i % 2 ? y.at[from] : x.at[from];
    });
}

// Two quarters of a, then two of b.
template <class V> V shuffle_quarters(const V& a, const V& b, int which) {
    const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
    return each<uint32_t, V>([&](int i) {
        const int from = (which >> (i / 4 * 2) & 3) * 4 + i % 4;
        return i < 8 ? x.at[from] : y.at[from];
    });
}

template <class F> uint32_t mask_of(F f) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= uint32_t(bool(f(i))) << i;
    return mask;
}

inline uint16_t rounded(float x) {  // to bfloat16, to nearest even; quiet NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

}  // namespace emulated

inline void _mm_prefetch(const void*, int) {}

// ------------------------------------------------------------------------------ loads and stores

inline __m128i _mm_loadu_si128(const __m128i* from) { return emulated::load<__m128i>(from); }
inline __m256i _mm256_loadu_si256(const __m256i* from) { return emulated::load<__m256i>(from); }
inline __m512i _mm512_loadu_si512(const void* from) { return emulated::load<__m512i>(from); }
inline __m512i _mm512_load_si512(const void* from) {
    if (uintptr_t(from) % 64) __builtin_trap();
    return emulated::load<__m512i>(from);
}
inline __m512 _mm512_loadu_ps(const void* from) { return emulated::load<__m512>(from); }
inline void _mm256_storeu_si256(__m256i* to, __m256i x) { std::memcpy((void*)to, &x, sizeof x); }
inline void _mm512_storeu_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_storeu_ps(void* to, __m512 x) { std::memcpy(to, &x, sizeof x); }
inline __m512 _mm512_mask_loadu_ps(__m512 otherwise, __mmask16 mask, const void* from) {
    return emulated::masked_load<float>(otherwise, mask, from);
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
    return emulated::masked_load<float>(__m512{}, mask, from);
}
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* from) {
    return emulated::masked_load<int32_t>(__m512i{}, mask, from);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
    return emulated::masked_load<int16_t>(__m256i{}, mask, from);
}
inline void _mm512_mask_storeu_ps(void* to, __mmask16 mask, __m512 x) {
    emulated::masked_store<float>(to, mask, x);
}
inline void _mm256_mask_storeu_epi16(void* to, __mmask16 mask, __m256i x) {
    emulated::masked_store<int16_t>(to, mask, x);
}

// -------------------------------------------------------------------------------------- constants

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_set1_ps(float x) {
    return emulated::each<float, __m512>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi16(short x) {
    return emulated::each<int16_t, __m512i>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi32(int x) {
    return emulated::each<int32_t, __m512i>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi64(long long x) {
    return emulated::each<int64_t, __m512i>([=](int) { return x; });
}
inline __m512i _mm512_set_epi64(
    long long h, long long g, long long f, long long e, long long d, long long c, long long b,
    long long a
) {
    return __m512i{a, b, c, d, e, f, g, h};
}

// ----------------------------------------------------------------------------------------- floats

inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {  // b if either is NaN
    return emulated::map<float>(a, b, [](float x, float y) { return x > y ? x : y; });
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return emulated::each<float, __m512>([&](int i) { return std::fma(a[i], b[i], c[i]); });
}
inline __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, -c); }
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    return emulated::map<float>(a, b, [](float x, float y) {
        return y == y ? std::ldexp(x, int(std::clamp(std::floor(y), -1000.f, 1000.f))) : y;
    });
}
inline __m512 _mm512_roundscale_ps(__m512 a, int) {
    return emulated::each<float, __m512>([&](int i) { return std::nearbyint(a[i]); });
}
inline float _mm512_reduce_add_ps(__m512 a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}
inline float _mm512_reduce_max_ps(__m512 a) {
    float most = a[0];
    for (int i = 1; i < 16; i++) most = a[i] > most ? a[i] : most;
    return most;
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    return emulated::mask_of([&](int i) {
        if (how == _CMP_EQ_OQ) return a[i] == b[i];
        if (how == _CMP_GE_OQ) return a[i] >= b[i];
        if (how == _CMP_GT_OQ) return a[i] > b[i];
        return a[i] != a[i] || b[i] != b[i];
    });
}
inline __m512 _mm512_mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 a) {
    return emulated::each<float, __m512>(
        [&](int i) { return mask >> i & 1 ? a[i] : otherwise[i]; });
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
    return _mm512_mask_mov_ps(__m512{}, mask, a);
}

// --------------------------------------------------------------------------------------- integers

inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return emulated::map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; });
}
inline __m512i _mm512_add_epi64(__m512i a, __m512i b) {
    return emulated::map<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x + y; });
}
inline __m512i _mm512_mullo_epi64(__m512i a, __m512i b) {
    return emulated::map<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x * y; });
}
inline __m512i _mm512_slli_epi32(__m512i a, int bits) {
    return emulated::map<uint32_t>(a, a, [=](uint32_t x, uint32_t) { return x << bits; });
}
inline __m512i _mm512_srli_epi64(__m512i a, int bits) {
    return emulated::map<uint64_t>(a, a, [=](uint64_t x, uint64_t) { return x >> bits; });
}
inline __m512i _mm512_srli_epi16(__m512i a, int bits) {
    return emulated::map<uint16_t>(a, a, [=](uint16_t x, uint16_t) { return x >> bits; });
}
inline __m512i _mm512_lzcnt_epi64(__m512i a) {
    return emulated::map<uint64_t>(
        a, a, [](uint64_t x, uint64_t) { return x ? __builtin_clzll(x) : 64; });
}
inline __mmask16 _mm512_cmpge_epi32_mask(__m512i a, __m512i b) {
    const auto x = emulated::lanes<int32_t>(a), y = emulated::lanes<int32_t>(b);
    return emulated::mask_of([&](int i) { return x.at[i] >= y.at[i]; });
}

// ------------------------------------------------------------------------------------ conversions

inline __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
inline __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
inline __m512i _mm512_castsi256_si512(__m256i a) {
    return __m512i{a[0], a[1], a[2], a[3], 0, 0, 0, 0};
}
inline __m512i _mm512_inserti64x4(__m512i a, __m256i b, int half) {
    for (int i = 0; i < 4; i++) a[4 * half + i] = b[i];
    return a;
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
    const auto x = emulated::lanes<int32_t>(a);
    return emulated::each<float, __m512>([&](int i) { return float(x.at[i]); });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
    const auto x = emulated::lanes<int8_t>(a);
    return emulated::each<int32_t, __m512i>([&](int i) { return x.at[i]; });
}
inline __m512i _mm512_cvtepu8_epi16(__m256i a) {
    const auto x = emulated::lanes<uint8_t>(a);
    return emulated::each<uint16_t, __m512i>([&](int i) { return x.at[i]; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
    const auto x = emulated::lanes<uint16_t>(a);
    return emulated::each<uint32_t, __m512i>([&](int i) { return x.at[i]; });
}
inline __m256i _mm512_cvtepi64_epi32(__m512i a) {
    return emulated::each<int32_t, __m256i>([&](int i) { return int32_t(a[i]); });
}

// ------------------------------------------------------------------------------------ permutations

inline __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) { return emulated::unpack<float>(a, b, false); }
inline __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) { return emulated::unpack<float>(a, b, true); }
#define UNPACK(BITS)                                                         \
    inline __m512i _mm512_unpacklo_epi##BITS(__m512i a, __m512i b) {         \
        return emulated::unpack<uint##BITS##_t>(a, b, false);                \
    }                                                                        \
    inline __m512i _mm512_unpackhi_epi##BITS(__m512i a, __m512i b) {         \
        return emulated::unpack<uint##BITS##_t>(a, b, true);                 \
    }
UNPACK(16)
UNPACK(32)
UNPACK(64)
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int which) {
    return emulated::shuffle_quarters(a, b, which);
}
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
    return emulated::shuffle_quarters(a, b, which);
}
inline __m512 _mm512_permutexvar_ps(__m512i places, __m512 a) {
    const auto from = emulated::lanes<uint32_t>(places);
    return emulated::each<float, __m512>([&](int i) { return a[from.at[i] % 16]; });
}
inline __m512i _mm512_permutexvar_epi16(__m512i places, __m512i a) {
    const auto from = emulated::lanes<uint16_t>(places), x = emulated::lanes<uint16_t>(a);
    return emulated::each<uint16_t, __m512i>([&](int i) { return x.at[from.at[i] % 32]; });
}

// --------------------------------------------------------------------------------------- bfloat16

inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
    return emulated::each<uint16_t, __m256bh>([&](int i) { return emulated::rounded(a[i]); });
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    return emulated::each<uint16_t, __m512bh>(
        [&](int i) { return emulated::rounded(i < 16 ? low[i] : high[i - 16]); });
}
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const auto x = emulated::lanes<uint16_t>(a), y = emulated::lanes<uint16_t>(b);
    return emulated::each<float, __m512>([&](int i) {
        const float odd = emulated::widened(x.at[2 * i + 1]) * emulated::widened(y.at[2 * i + 1]);
        return sum[i] + odd + emulated::widened(x.at[2 * i]) * emulated::widened(y.at[2 * i]);
    });
}

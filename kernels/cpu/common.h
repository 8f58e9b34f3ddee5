// Shared by the CPU kernels: vectors of 16 float32 lanes, products of bfloat16 pairs, exponentials.
// Requires AVX-512; the bfloat16 kernels require AVX512_BF16 too.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace cpu {

using bf16 = uint16_t;
constexpr int LANES = 16;

inline __m512 zero() { return _mm512_setzero_ps(); }

// Round to nearest even; NaN becomes a quiet NaN.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// 2^x by a polynomial on [-0.5, 0.5]. Relative error below 2e-7; 0 below x = -126.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.f), x);  // this operand order keeps NaN
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.54035304e-4f);
    for (float c : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f,
                    6.93147181e-1f, 1.f})
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, whole);
}

// 2^x for results that are rounded to bfloat16, in two thirds of the time.
// Relative error below 3e-6; 2^-125 below x = -125.
inline __m512 fast_exp2(__m512 x) {
    // 1.5 · 2^23: added to x, it leaves round(x) in the mantissa's low bits
    const __m512 magic = _mm512_set1_ps(12582912.f);
    x = _mm512_max_ps(_mm512_set1_ps(-125.f), x);
    __m512 shifted = _mm512_add_ps(x, magic);
    __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
    __m512 y = _mm512_set1_ps(9.57010148e-3f);
    for (float c : {5.59178607e-2f, 2.40247448e-1f, 6.93121815e-1f, 9.99999261e-1f})
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
}

inline __m512 exp(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f))); }

// An element type as the products use it: a 32-bit word holds one float or two bfloat16.
template <class T> struct Words;

template <> struct Words<float> {
    static constexpr int PACK = 1;  // elements per word
    static __m512 softmax_exp2(__m512 x) { return exp2(x); }
    static __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
    static void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
    static void store(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
    static __m512 load(const float* from, __mmask16 mask) {
        return _mm512_maskz_loadu_ps(mask, from);
    }
    static float from_float(float x) { return x; }
    static float to_float(float x) { return x; }
};

#ifdef __AVX512BF16__
template <> struct Words<bf16> {
    static constexpr int PACK = 2;
    static __m512 softmax_exp2(__m512 x) { return fast_exp2(x); }
    static __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    static void store(bf16* to, __m512 x) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
    }
    static void store(bf16* to, __m512 x, __mmask16 mask) {
        _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
    }
    static __m512 load(const bf16* from, __mmask16 mask) {
        __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    }
    static bf16 from_float(float x) { return to_bf16(x); }
    static float to_float(bf16 x) {
        uint32_t bits = uint32_t(x) << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        return y;
    }
};
#endif

// The first `count` lanes.
inline __mmask16 first_lanes(int count) {
    return __mmask16(count >= LANES ? 0xffff : (1u << count) - 1);
}

}  // namespace cpu

// Projections of a few rows, which cost what reading their weights costs (see kernels/linear.py, which defines them).
//
// Weights lie as the model has them, (out, in), and are read once, in order. A sum runs over the input channels in the
// same order whatever the other rows are, so a row's result is the same bit for bit in any company.
#include "common.h"

namespace cpu {

// The sums over the lanes of each of 16 vectors.
inline __m512 reduced(__m512 r[LANES]) {
    __m512 t[LANES];
    for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[i], r[i + 8], 0x44), _mm512_shuffle_f32x4(r[i], r[i + 8], 0xee));
    for (int i = 0; i < 4; i++)
        t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd));
    for (int i = 0; i < 2; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(t[i], t[i + 2]), _mm512_unpackhi_ps(t[i], t[i + 2]));
    return _mm512_add_ps(_mm512_unpacklo_ps(t[0], t[1]), _mm512_unpackhi_ps(t[0], t[1]));
}

// Brings them from the places where the adding leaves them into order.
inline __m512 ordered(__m512 sums) {
    static const auto places = [] {
        std::array<int, LANES> p{};
        for (int i = 0; i < LANES; i++) {
            __m512 r[LANES];
            float lanes[LANES];
            for (int k = 0; k < LANES; k++) r[k] = k == i ? _mm512_set1_ps(1.f) : zero();
            _mm512_storeu_ps(lanes, reduced(r));
            p[i] = int(std::find_if(lanes, lanes + LANES, [](float x) { return x != 0.f; }) - lanes);
        }
        return p;
    }();
    return _mm512_permutexvar_ps(_mm512_loadu_si512(places.data()), sums);
}

// The products of R rows and OUT outputs, R × OUT = 16: lane r * OUT + o.
// `ahead`: how many elements further the weights lie that will be wanted next, 0 if they have been fetched.
template <class T, int R> __m512 tile(const T* const* x, const T* const* w, int in, int64_t ahead) {
    constexpr int OUT = LANES / R, STEP = LANES * Words<T>::PACK;
    __m512 sum[LANES];
    for (auto& s : sum) s = zero();
    int i = 0;
    for (; i + STEP <= in; i += STEP) {
        __m512i a[R];
        for (int r = 0; r < R; r++) a[r] = _mm512_loadu_si512(x[r] + i);
        for (int o = 0; o < OUT; o++) {
            __m512i b = _mm512_loadu_si512(w[o] + i);
            if (ahead) _mm_prefetch((const char*)(w[o] + i + ahead), _MM_HINT_T1);
            for (int r = 0; r < R; r++) sum[r * OUT + o] = Words<T>::dot(sum[r * OUT + o], a[r], b);
        }
    }
    if (i < in) {  // whole words: `in` is even where two elements make one
        const __mmask16 rest = __mmask16((1u << (in - i) / Words<T>::PACK) - 1);
        for (int o = 0; o < OUT; o++)
            for (int r = 0; r < R; r++)
                sum[r * OUT + o] = Words<T>::dot(sum[r * OUT + o], _mm512_maskz_loadu_epi32(rest, x[r] + i),
                                                 _mm512_maskz_loadu_epi32(rest, w[o] + i));
    }
    return ordered(reduced(sum));
}

inline __m512 silu(__m512 x) {
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), exp(_mm512_sub_ps(zero(), x))));
}

template <class T> struct Product {
    const T *x, *w, *u, *bias;
    T* y;
    int rows, in, out;
};

// Up to R rows and 16 / R outputs from `o` on; none behind `end`.
template <class T, int R> void cell(const Product<T>& p, int row, int o, int end, int64_t ahead) {
    constexpr int OUT = LANES / R;
    const T *a[R], *b[OUT], *c[OUT];
    for (int r = 0; r < R; r++) a[r] = p.x + int64_t(std::min(row + r, p.rows - 1)) * p.in;
    for (int k = 0; k < OUT; k++) {
        const int64_t at = int64_t(std::min(o + k, end - 1)) * p.in;
        b[k] = p.w + at;
        c[k] = p.u ? p.u + at : nullptr;
    }
    __m512 sum = tile<T, R>(a, b, p.in, ahead);
    if (p.u) sum = _mm512_mul_ps(silu(sum), tile<T, R>(a, c, p.in, ahead));
    alignas(64) T values[LANES];
    if (p.bias) {
        for (int i = 0; i < LANES; i++) values[i] = p.bias[std::min(o + i % OUT, end - 1)];
        sum = _mm512_add_ps(sum, Words<T>::load(values, 0xffff));
    }
    Words<T>::store(values, sum);
    if (row + R <= p.rows && o + OUT <= end)  // copies of a size that the compiler knows
        for (int r = 0; r < R; r++) std::memcpy(p.y + int64_t(row + r) * p.out + o, values + r * OUT, sizeof(T) * OUT);
    else for (int r = 0; r < R && row + r < p.rows; r++)
        std::memcpy(p.y + int64_t(row + r) * p.out + o, values + r * OUT, sizeof(T) * std::min(OUT, end - o));
}

// A thread's outputs [first, end), in blocks whose rows stay in the first cache and whose weights stay in the second.
template <class T, int R> void block(const Product<T>& p, int first, int end) {
    constexpr int OUT = LANES / R, OUTS = 64, AHEAD = 16, BYTES = 20 << 10;
    const int ROWS = std::clamp(BYTES / int(p.in * sizeof(T)) / 4 * 4, 4, 16);
    for (int outs = first; outs < end; outs += OUTS)
        for (int rows = 0; rows < p.rows; rows += ROWS)
            for (int o = outs; o < std::min(outs + OUTS, end); o += OUT)
                for (int row = rows; row < std::min(rows + ROWS, p.rows); row += R)
                    cell<T, R>(p, row, o, end, row ? 0 : int64_t(AHEAD) * p.in);
}

// y = x Wᵀ + b, or silu(x Wᵀ) · (x Uᵀ) where there is a second matrix U.
template <class T> void linear(const Product<T>& p, int threads) {
    constexpr int GRAIN = 16;
    const int64_t grains = (p.out + GRAIN - 1) / GRAIN;
#pragma omp parallel num_threads(threads)
    {
        const int n = omp_get_num_threads(), me = omp_get_thread_num();
        const int first = int(grains * me / n * GRAIN), end = std::min(p.out, int(grains * (me + 1) / n * GRAIN));
        if (p.rows == 1) block<T, 1>(p, first, end);
        else if (p.rows == 2) block<T, 2>(p, first, end);
        else block<T, 4>(p, first, end);
    }
}

// x / sqrt(mean(x²) + eps) · weight
template <class T> void rms_norm(const T* x, const T* weight, T* y, int rows, int width, float eps) {
    for (int row = 0; row < rows; row++, x += width, y += width) {
        __m512 sum = zero();
        auto some = [&](int i) { return __mmask16(width - i >= LANES ? 0xffff : (1u << (width - i)) - 1); };
        for (int i = 0; i < width; i += LANES) {
            __m512 v = Words<T>::load(x + i, some(i));
            sum = _mm512_fmadd_ps(v, v, sum);
        }
        const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(sum) / width + eps));
        for (int i = 0; i < width; i += LANES) {
            __m512 v = _mm512_mul_ps(Words<T>::load(x + i, some(i)), scale);
            Words<T>::store(y + i, _mm512_mul_ps(v, Words<T>::load(weight + i, some(i))), some(i));
        }
    }
}

}  // namespace cpu

#define PROJECTIONS(NAME, T)                                                                                           \
    extern "C" void linear_##NAME(const T* x, const T* w, const T* u, const T* bias, T* y, int rows, int in, int out,  \
                                  int threads) {                                                                       \
        cpu::linear<T>({x, w, u, bias, y, rows, in, out}, threads);                                                      \
    }                                                                                                                  \
    extern "C" void rms_norm_##NAME(const T* x, const T* weight, T* y, int rows, int width, float eps) {               \
        cpu::rms_norm<T>(x, weight, y, rows, width, eps);                                                              \
    }

PROJECTIONS(float, float)
#ifdef __AVX512BF16__
PROJECTIONS(bf16, cpu::bf16)
#endif

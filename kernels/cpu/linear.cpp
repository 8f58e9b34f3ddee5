// Projections of a few rows and RMS norm; kernels/linear.py defines them.
//
// The cost is reading the weights. They keep the model's layout (out, in) and are read once, in
// order. A sum over the input channels has an order that does not depend on the other rows, so the
// result of a row is bitwise the same in any batch.
#include "common.h"

namespace cpu {

// The sum over the lanes of each of 16 vectors. `ordered` restores the order of the sums.
inline __m512 reduced(__m512 r[LANES]) {
    __m512 t[LANES];
    for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[i], r[i + 8], 0x44),
                             _mm512_shuffle_f32x4(r[i], r[i + 8], 0xee));
    for (int i = 0; i < 4; i++)
        t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[i], t[i + 4], 0x88),
                             _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd));
    for (int i = 0; i < 2; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(t[i], t[i + 2]),
                             _mm512_unpackhi_ps(t[i], t[i + 2]));
    return _mm512_add_ps(_mm512_unpacklo_ps(t[0], t[1]), _mm512_unpackhi_ps(t[0], t[1]));
}

// Permutes the sums of `reduced` so that lane i holds the sum of vector i.
inline __m512 ordered(__m512 sums) {
    static const auto lane_of_vector = [] {
        std::array<int, LANES> p{};
        for (int i = 0; i < LANES; i++) {
            __m512 r[LANES];
            float lanes[LANES];
            for (int k = 0; k < LANES; k++) r[k] = k == i ? _mm512_set1_ps(1.f) : zero();
            _mm512_storeu_ps(lanes, reduced(r));
            auto nonzero = [](float x) { return x != 0.f; };
            p[i] = int(std::find_if(lanes, lanes + LANES, nonzero) - lanes);
        }
        return p;
    }();
    return _mm512_permutexvar_ps(_mm512_loadu_si512(lane_of_vector.data()), sums);
}

// The products of R rows and OUT outputs, R × OUT = 16, in lane r * OUT + o.
// `ahead`: distance in elements to the weights to prefetch; 0: they have been fetched.
template <class T, int R>
__m512 tile(const T* const* x, const T* const* w, int in, int64_t ahead) {
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
            for (int r = 0; r < R; r++)
                sum[r * OUT + o] = Words<T>::dot(sum[r * OUT + o], a[r], b);
        }
    }
    if (i < in) {  // whole words remain, since `in` is even
        const __mmask16 rest = __mmask16((1u << (in - i) / Words<T>::PACK) - 1);
        for (int o = 0; o < OUT; o++)
            for (int r = 0; r < R; r++)
                sum[r * OUT + o] = Words<T>::dot(sum[r * OUT + o],
                                                 _mm512_maskz_loadu_epi32(rest, x[r] + i),
                                                 _mm512_maskz_loadu_epi32(rest, w[o] + i));
    }
    return ordered(reduced(sum));
}

inline __m512 silu(__m512 x) {
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), exp(_mm512_sub_ps(zero(), x))));
}

template <class T> struct Product {
    const T *x, *w;
    const T* up;  // second matrix of SwiGLU, or null
    const T* bias;  // or null
    T* y;
    int rows, in, out;
};

// Up to R rows from `row` on, and up to 16 / R outputs from `o` on, before `end`.
template <class T, int R> void cell(const Product<T>& p, int row, int o, int end, int64_t ahead) {
    constexpr int OUT = LANES / R;
    const T *a[R], *b[OUT], *c[OUT];
    for (int r = 0; r < R; r++) a[r] = p.x + int64_t(std::min(row + r, p.rows - 1)) * p.in;
    for (int k = 0; k < OUT; k++) {
        const int64_t at = int64_t(std::min(o + k, end - 1)) * p.in;
        b[k] = p.w + at;
        c[k] = p.up ? p.up + at : nullptr;
    }
    __m512 sum = tile<T, R>(a, b, p.in, ahead);
    if (p.up) sum = _mm512_mul_ps(silu(sum), tile<T, R>(a, c, p.in, ahead));
    alignas(64) T values[LANES];
    if (p.bias) {
        for (int i = 0; i < LANES; i++) values[i] = p.bias[std::min(o + i % OUT, end - 1)];
        sum = _mm512_add_ps(sum, Words<T>::load(values, 0xffff));
    }
    Words<T>::store(values, sum);
    if (row + R <= p.rows && o + OUT <= end)  // copies of a constant size are faster
        for (int r = 0; r < R; r++)
            std::memcpy(p.y + int64_t(row + r) * p.out + o, values + r * OUT, sizeof(T) * OUT);
    else
        for (int r = 0; r < R && row + r < p.rows; r++)
            std::memcpy(p.y + int64_t(row + r) * p.out + o, values + r * OUT,
                        sizeof(T) * std::min(OUT, end - o));
}

// A thread's outputs [first, end), in blocks: the rows of a block stay in the L1 cache, its weights
// in the L2 cache.
template <class T, int R> void block(const Product<T>& p, int first, int end) {
    constexpr int OUT = LANES / R, OUTS = 64, AHEAD = 16, BYTES = 20 << 10;
    const int ROWS = std::clamp(BYTES / int(p.in * sizeof(T)) / 4 * 4, 4, 16);
    for (int outs = first; outs < end; outs += OUTS)
        for (int rows = 0; rows < p.rows; rows += ROWS)
            for (int o = outs; o < std::min(outs + OUTS, end); o += OUT)
                for (int row = rows; row < std::min(rows + ROWS, p.rows); row += R)
                    cell<T, R>(p, row, o, end, row ? 0 : int64_t(AHEAD) * p.in);
}

// y = x Wᵀ + b, or silu(x Wᵀ) · (x Uᵀ) if there is a second matrix U.
template <class T> void linear(const Product<T>& p, int threads) {
    constexpr int GRAIN = 16;  // outputs; a thread's share is a multiple of this
    const int64_t grains = (p.out + GRAIN - 1) / GRAIN;
#pragma omp parallel num_threads(threads)
    {
        const int n = omp_get_num_threads(), thread = omp_get_thread_num();
        const int first = int(grains * thread / n * GRAIN);
        const int end = std::min(p.out, int(grains * (thread + 1) / n * GRAIN));
        if (p.rows == 1) block<T, 1>(p, first, end);
        else if (p.rows == 2) block<T, 2>(p, first, end);
        else block<T, 4>(p, first, end);
    }
}

// x / sqrt(mean(x²) + eps) · weight
template <class T>
void rms_norm(const T* x, const T* weight, T* y, int rows, int width, float eps) {
    for (int row = 0; row < rows; row++, x += width, y += width) {
        __m512 sum = zero();
        auto mask = [&](int i) { return first_lanes(width - i); };
        for (int i = 0; i < width; i += LANES) {
            __m512 v = Words<T>::load(x + i, mask(i));
            sum = _mm512_fmadd_ps(v, v, sum);
        }
        const float mean_square = _mm512_reduce_add_ps(sum) / width;
        const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(mean_square + eps));
        for (int i = 0; i < width; i += LANES) {
            __m512 v = _mm512_mul_ps(Words<T>::load(x + i, mask(i)), scale);
            Words<T>::store(y + i, _mm512_mul_ps(v, Words<T>::load(weight + i, mask(i))), mask(i));
        }
    }
}

}  // namespace cpu

#define PROJECTIONS(NAME, T)                                                                  \
    extern "C" void linear_##NAME(const T* x, const T* w, const T* up, const T* bias, T* y,   \
                                  int rows, int in, int out, int threads) {                   \
        cpu::linear<T>({x, w, up, bias, y, rows, in, out}, threads);                          \
    }                                                                                         \
    extern "C" void rms_norm_##NAME(const T* x, const T* weight, T* y, int rows, int width,   \
                                    float eps) {                                              \
        cpu::rms_norm<T>(x, weight, y, rows, width, eps);                                     \
    }

PROJECTIONS(float, float)
#ifdef __AVX512BF16__
PROJECTIONS(bf16, cpu::bf16)
#endif

// Projections of drafts: 8-bit and 4-bit weights (see kernels/low_bit.py), and those that read only the input channels
// that count (see kernels/sparse_linear.py). A draft may round what a verification may not: activations become bfloat16.
#include "common.h"

#include <memory>
#include <vector>

namespace cpu {

constexpr int BLOCK = 64;  // channels that are taken at once
constexpr int GROUP = 32;  // channels that share a scale at 4 bits

#ifdef __AVX512BF16__

// Rows of activations as bfloat16, filled up to whole blocks with zeros, and the sum of each group.
struct Fed {
    int blocks;
    std::vector<bf16> values;
    std::vector<float> sums;
    __m512i at(int row, int half) const { return _mm512_loadu_si512(&values[(size_t(row) * blocks * 2 + half) * GROUP]); }
    const float* sums_of(int row) const { return &sums[size_t(row) * blocks * 2]; }
};

template <class T> Fed fed(const T* x, int rows, int in) {
    const int blocks = (in + BLOCK - 1) / BLOCK;
    Fed f{blocks, std::vector<bf16>(size_t(rows) * blocks * BLOCK), std::vector<float>(size_t(rows) * blocks * 2)};
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < in; i += LANES) {
            const __m512 v = Words<T>::load(x + int64_t(row) * in + i,
                                            __mmask16(in - i >= LANES ? 0xffff : (1u << (in - i)) - 1));
            bf16* to = &f.values[size_t(row) * blocks * BLOCK + i];
            Words<bf16>::store(to, v);
            f.sums[size_t(row) * blocks * 2 + i / GROUP] += _mm512_reduce_add_ps(Words<bf16>::load(to, 0xffff));
        }
    return f;
}

// Weights of 8 bits: (out, padded), and a scale for each output.
struct Eight {
    const int8_t* weight;
    const float* scale;
    int blocks;
    const int8_t* place(int64_t out, int block) const { return weight + (out * blocks + block) * BLOCK; }
    void load(int64_t out, int block, __m512i halves[2]) const {
        for (int k = 0; k < 2; k++) {
            const int8_t* from = place(out, block) + k * GROUP;
            __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
            __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + LANES))));
            halves[k] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
    }
    __m512 add(__m512 sum, __m512i w, __m512i x, int64_t, int) const { return Words<bf16>::dot(sum, w, x); }
    float last(float sum, int64_t out, const float*) const { return sum * scale[out]; }
};

// Weights of 4 bits: of 64 channels the first 32 in the low halves of 32 bytes, the others in the high ones; level 8
// stands for `middle`, and a level more for a `scale` more, of each 32 channels.
struct Four {
    const uint8_t* weight;
    const float *scale, *middle;
    int blocks;
    const uint8_t* place(int64_t out, int block) const { return weight + (out * blocks + block) * (BLOCK / 2); }
    void load(int64_t out, int block, __m512i halves[2]) const {
        alignas(64) static const auto levels = [] {
            std::array<bf16, 32> table{};
            for (int i = 0; i < 32; i++) table[i] = rounded(float(i % 16 - 8));
            return table;
        }();
        const __m512i table = _mm512_load_si512(levels.data());
        const __m512i packed = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)place(out, block)));
        halves[0] = _mm512_permutexvar_epi16(_mm512_and_si512(packed, _mm512_set1_epi16(15)), table);
        halves[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 4), table);
    }
    __m512 add(__m512 sum, __m512i w, __m512i x, int64_t out, int half) const {
        return _mm512_fmadd_ps(Words<bf16>::dot(zero(), w, x), _mm512_set1_ps(scale[out * blocks * 2 + half]), sum);
    }
    float last(float sum, int64_t out, const float* sums) const {
        for (int g = 0; g < blocks * 2; g++) sum += middle[out * blocks * 2 + g] * sums[g];
        return sum;
    }
};

// R rows and OUT outputs at once.
template <class T, class W, int R, int OUT>
void cell(const Fed& x, const W& w, const T* bias, T* y, int row, int rows, int64_t first, int64_t end, int out) {
    __m512 sum[R][OUT];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUT; o++) sum[r][o] = zero();
    for (int b = 0; b < x.blocks; b++)
        for (int o = 0; o < OUT; o++) {
            const int64_t at = std::min(first + o, end - 1);
            __m512i halves[2];
            w.load(at, b, halves);
            if (!row) _mm_prefetch((const char*)w.place(at + 16, b), _MM_HINT_T1);
            for (int k = 0; k < 2; k++)
                for (int r = 0; r < R; r++)
                    sum[r][o] = w.add(sum[r][o], halves[k], x.at(std::min(row + r, rows - 1), 2 * b + k), at, 2 * b + k);
        }
    for (int r = 0; r < R && row + r < rows; r++)
        for (int o = 0; o < OUT && first + o < end; o++) {
            float value = w.last(_mm512_reduce_add_ps(sum[r][o]), first + o, x.sums_of(row + r));
            if (bias) value += Words<T>::from(bias[first + o]);
            y[int64_t(row + r) * out + first + o] = Words<T>::one(value);
        }
}

template <class T, class W>
void low_bit(const T* x, W w, const T* bias, T* y, int rows, int in, int out, int threads) {
    const Fed f = fed(x, rows, in);
    w.blocks = f.blocks;
#pragma omp parallel num_threads(threads)
    {
        const int64_t n = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t first = out * me / n, end = out * (me + 1) / n;
        for (int64_t o = first; o < end; o += 4)
            if (rows == 1)
                cell<T, W, 1, 4>(f, w, bias, y, 0, rows, o, end, out);
            else
                for (int row = 0; row < rows; row += 4) cell<T, W, 4, 4>(f, w, bias, y, row, rows, o, end, out);
    }
}

#endif

// Products with a transposed weight, (in, out), of which the rows of channels are read that are above the threshold in
// some row of x.
template <class T> struct Wide;

template <> struct Wide<float> {  // 16 outputs of one channel
    static constexpr int OUT = 16, VECTORS = 1;
    static void add(__m512* sum, const float* a, const float*, const float* x) {
        sum[0] = _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_set1_ps(x[0]), sum[0]);
    }
    static void store(float* y, const __m512* sum) { _mm512_storeu_ps(y, sum[0]); }
};

#ifdef __AVX512BF16__
template <> struct Wide<bf16> {  // 32 outputs of two channels, in the order that interleaving leaves
    static constexpr int OUT = 32, VECTORS = 2;
    static void add(__m512* sum, const bf16* a, const bf16* b, const bf16* x) {
        const __m512i one = _mm512_loadu_si512(a), other = _mm512_loadu_si512(b);
        const __m512i both = _mm512_set1_epi32(int32_t(uint32_t(x[0]) | uint32_t(x[1]) << 16));
        sum[0] = Words<bf16>::dot(sum[0], _mm512_unpacklo_epi16(one, other), both);
        sum[1] = Words<bf16>::dot(sum[1], _mm512_unpackhi_epi16(one, other), both);
    }
    static void store(bf16* y, const __m512* sum) {
        bf16 low[16], high[16];
        Words<bf16>::store(low, sum[0]);
        Words<bf16>::store(high, sum[1]);
        for (int lane = 0; lane < 4; lane++) {
            std::copy_n(low + lane * 4, 4, y + lane * 8);
            std::copy_n(high + lane * 4, 4, y + lane * 8 + 4);
        }
    }
};
#endif

template <class T> void sparse(const T* x, const T* w, T* y, int rows, int in, int out, float threshold, int threads) {
    std::vector<int> active;
    std::vector<T> kept;  // [pair of channels or channel][row][PACK]
    constexpr int PACK = Words<T>::PACK;
    for (int i = 0; i < in; i++)
        for (int row = 0; row < rows; row++)
            if (std::fabs(Words<T>::from(x[int64_t(row) * in + i])) > threshold) {
                active.push_back(i);
                break;
            }
    while (active.size() % PACK) active.push_back(-1);
    for (size_t at = 0; at < active.size(); at += PACK)
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < PACK; k++) {
                const int i = active[at + k];
                const T value = i < 0 ? T(0) : x[int64_t(row) * in + i];
                kept.push_back(std::fabs(Words<T>::from(value)) > threshold ? value : T(0));
            }
    for (int& i : active) i = std::max(i, 0);
    constexpr int TILE = 4, OUT = Wide<T>::OUT, AHEAD = 8 * PACK;  // vectors of outputs that are summed together
    const int64_t tiles = (out + OUT * TILE - 1) / (OUT * TILE);
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int row = 0; row < rows; row++) {
            const int first = int(tile) * OUT * TILE, count = std::min(TILE, (out - first) / OUT);
            __m512 sum[TILE][Wide<T>::VECTORS];
            for (auto& s : sum)
                for (auto& v : s) v = zero();
            for (size_t at = 0; at < active.size(); at += PACK) {
                if (!row && at + AHEAD < active.size())
                    for (int k = 0; k < PACK; k++)
                        for (int n = 0; n < count; n++)
                            _mm_prefetch((const char*)(w + int64_t(active[at + AHEAD + k]) * out + first + n * OUT),
                                         _MM_HINT_T0);
                for (int n = 0; n < count; n++)
                    Wide<T>::add(sum[n], w + int64_t(active[at]) * out + first + n * OUT,
                                 w + int64_t(active[at + PACK - 1]) * out + first + n * OUT,
                                 &kept[(at / PACK * rows + row) * PACK]);
            }
            for (int n = 0; n < count; n++) Wide<T>::store(y + int64_t(row) * out + first + n * OUT, sum[n]);
        }
}

}  // namespace cpu

#define DRAFTS(NAME, T)                                                                                                \
    extern "C" void sparse_##NAME(const T* x, const T* w, T* y, int rows, int in, int out, float threshold,            \
                                  int threads) {                                                                       \
        cpu::sparse<T>(x, w, y, rows, in, out, threshold, threads);                                                    \
    }
#define LOW_BITS(NAME, T)                                                                                              \
    extern "C" void int8_##NAME(const T* x, const int8_t* w, const float* scale, const float*, const T* bias, T* y,    \
                                int rows, int in, int out, int threads) {                                              \
        cpu::low_bit(x, cpu::Eight{w, scale, 0}, bias, y, rows, in, out, threads);                                     \
    }                                                                                                                  \
    extern "C" void int4_##NAME(const T* x, const uint8_t* w, const float* scale, const float* middle, const T* bias,  \
                                T* y, int rows, int in, int out, int threads) {                                        \
        cpu::low_bit(x, cpu::Four{w, scale, middle, 0}, bias, y, rows, in, out, threads);                              \
    }

DRAFTS(float, float)
#ifdef __AVX512BF16__
DRAFTS(bf16, cpu::bf16)
LOW_BITS(float, float)
LOW_BITS(bf16, cpu::bf16)
#endif

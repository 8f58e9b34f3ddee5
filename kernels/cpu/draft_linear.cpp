// Projections for drafts: 8-bit and 4-bit weights (kernels/low_bit.py), and products that read only
// active input channels (kernels/sparse_linear.py).
//
// A draft may be less exact than a verification: the low-bit products round activations to
// bfloat16.
#include "common.h"

#include <memory>
#include <vector>

namespace cpu {

constexpr int BLOCK = 64;  // input channels that are read at once
constexpr int GROUP = 32;  // input channels that share a scale at 4 bits

#ifdef __AVX512BF16__

// Rows of activations in bfloat16, padded with zeros to whole blocks, and the sum of each group.
struct Activations {
    int blocks;
    std::vector<bf16> values;
    std::vector<float> sums;
    __m512i at(int row, int group) const {
        return _mm512_loadu_si512(&values[(size_t(row) * blocks * 2 + group) * GROUP]);
    }
    const float* sums_of(int row) const { return &sums[size_t(row) * blocks * 2]; }
};

template <class T> Activations round_activations(const T* x, int rows, int in) {
    const int blocks = (in + BLOCK - 1) / BLOCK;
    Activations a{blocks, std::vector<bf16>(size_t(rows) * blocks * BLOCK),
                  std::vector<float>(size_t(rows) * blocks * 2)};
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < in; i += LANES) {
            const __m512 v = Words<T>::load(
                x + int64_t(row) * in + i,
                __mmask16(in - i >= LANES ? 0xffff : (1u << (in - i)) - 1));
            bf16* to = &a.values[size_t(row) * blocks * BLOCK + i];
            Words<bf16>::store(to, v);
            a.sums[size_t(row) * blocks * 2 + i / GROUP] +=
                _mm512_reduce_add_ps(Words<bf16>::load(to, 0xffff));
        }
    return a;
}

// 8-bit weights: levels (out, padded channels), one scale per output.
struct Weight8 {
    const int8_t* weight;
    const float* scale;
    int blocks;
    const int8_t* block_at(int64_t out, int block) const {
        return weight + (out * blocks + block) * BLOCK;
    }
    // The levels of a block as bfloat16, 32 channels each.
    void load(int64_t out, int block, __m512i halves[2]) const {
        for (int k = 0; k < 2; k++) {
            const int8_t* from = block_at(out, block) + k * GROUP;
            __m128i low_bytes = _mm_loadu_si128((const __m128i*)from);
            __m128i high_bytes = _mm_loadu_si128((const __m128i*)(from + LANES));
            __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low_bytes));
            __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high_bytes));
            halves[k] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
    }
    __m512 add(__m512 sum, __m512i w, __m512i x, int64_t, int) const {
        return Words<bf16>::dot(sum, w, x);
    }
    float finish(float sum, int64_t out, const float*) const { return sum * scale[out]; }
};

// 4-bit weights, 64 input channels in 32 bytes: the first 32 channels in the lower halves of the
// bytes, the others in the upper halves. weight = (level - 8) · scale + offset, with a scale and an
// offset per group of 32 input channels.
struct Weight4 {
    const uint8_t* weight;
    const float *scale, *offset;
    int blocks;
    const uint8_t* block_at(int64_t out, int block) const {
        return weight + (out * blocks + block) * (BLOCK / 2);
    }
    // level - 8 of a block's channels as bfloat16, 32 channels each.
    void load(int64_t out, int block, __m512i halves[2]) const {
        alignas(64) static const auto levels = [] {
            std::array<bf16, 32> table{};
            for (int i = 0; i < 32; i++) table[i] = to_bf16(float(i % 16 - 8));
            return table;
        }();
        const __m512i table = _mm512_load_si512(levels.data());
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)block_at(out, block));
        const __m512i packed = _mm512_cvtepu8_epi16(bytes);
        const __m512i lower = _mm512_and_si512(packed, _mm512_set1_epi16(15));
        halves[0] = _mm512_permutexvar_epi16(lower, table);
        halves[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 4), table);
    }
    __m512 add(__m512 sum, __m512i w, __m512i x, int64_t out, int group) const {
        return _mm512_fmadd_ps(Words<bf16>::dot(zero(), w, x),
                               _mm512_set1_ps(scale[out * blocks * 2 + group]), sum);
    }
    float finish(float sum, int64_t out, const float* sums) const {
        for (int g = 0; g < blocks * 2; g++) sum += offset[out * blocks * 2 + g] * sums[g];
        return sum;
    }
};

// The products of R rows and OUT outputs.
template <class T, class W, int R, int OUT>
void cell(const Activations& x, const W& w, const T* bias, T* y, int row, int rows, int64_t first,
          int64_t end, int out) {
    __m512 sum[R][OUT];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUT; o++) sum[r][o] = zero();
    for (int b = 0; b < x.blocks; b++)
        for (int o = 0; o < OUT; o++) {
            const int64_t at = std::min(first + o, end - 1);
            __m512i halves[2];
            w.load(at, b, halves);
            if (!row) _mm_prefetch((const char*)w.block_at(at + 16, b), _MM_HINT_T1);
            for (int k = 0; k < 2; k++)
                for (int r = 0; r < R; r++)
                    sum[r][o] = w.add(sum[r][o], halves[k],
                                      x.at(std::min(row + r, rows - 1), 2 * b + k), at, 2 * b + k);
        }
    for (int r = 0; r < R && row + r < rows; r++)
        for (int o = 0; o < OUT && first + o < end; o++) {
            float value = w.finish(_mm512_reduce_add_ps(sum[r][o]), first + o, x.sums_of(row + r));
            if (bias) value += Words<T>::to_float(bias[first + o]);
            y[int64_t(row + r) * out + first + o] = Words<T>::from_float(value);
        }
}

template <class T, class W>
void low_bit(const T* x, W w, const T* bias, T* y, int rows, int in, int out, int threads) {
    const Activations a = round_activations(x, rows, in);
    w.blocks = a.blocks;
#pragma omp parallel num_threads(threads)
    {
        const int64_t n = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t first = out * thread / n, end = out * (thread + 1) / n;
        for (int64_t o = first; o < end; o += 4)
            if (rows == 1)
                cell<T, W, 1, 4>(a, w, bias, y, 0, rows, o, end, out);
            else
                for (int row = 0; row < rows; row += 4)
                    cell<T, W, 4, 4>(a, w, bias, y, row, rows, o, end, out);
    }
}

#endif

// Sums of OUT outputs over PACK channels of a channel-major weight.
template <class T> struct Wide;

template <> struct Wide<float> {  // 16 outputs of one channel
    static constexpr int OUT = 16, VECTORS = 1;
    static void add(__m512* sum, const float* a, const float*, const float* x) {
        sum[0] = _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_set1_ps(x[0]), sum[0]);
    }
    static void store(float* y, const __m512* sum) { _mm512_storeu_ps(y, sum[0]); }
};

#ifdef __AVX512BF16__
template <> struct Wide<bf16> {  // 32 outputs of two channels, in interleaved order until stored
    static constexpr int OUT = 32, VECTORS = 2;
    static void add(__m512* sum, const bf16* a, const bf16* b, const bf16* x) {
        const __m512i w_a = _mm512_loadu_si512(a), w_b = _mm512_loadu_si512(b);
        const __m512i both = _mm512_set1_epi32(int32_t(uint32_t(x[0]) | uint32_t(x[1]) << 16));
        sum[0] = Words<bf16>::dot(sum[0], _mm512_unpacklo_epi16(w_a, w_b), both);
        sum[1] = Words<bf16>::dot(sum[1], _mm512_unpackhi_epi16(w_a, w_b), both);
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

// y = x Wᵀ with a channel-major weight, memory layout (in, out). Reads only the channels whose
// magnitude is above the threshold in any row.
template <class T>
void sparse(const T* x, const T* w, T* y, int rows, int in, int out, float threshold, int threads) {
    std::vector<int> active;
    std::vector<T> kept;  // [PACK active channels][row][PACK]: activations, 0 below the threshold
    constexpr int PACK = Words<T>::PACK;
    for (int i = 0; i < in; i++)
        for (int row = 0; row < rows; row++)
            if (std::fabs(Words<T>::to_float(x[int64_t(row) * in + i])) > threshold) {
                active.push_back(i);
                break;
            }
    while (active.size() % PACK) active.push_back(-1);  // padding
    for (size_t at = 0; at < active.size(); at += PACK)
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < PACK; k++) {
                const int i = active[at + k];
                const T value = i < 0 ? T(0) : x[int64_t(row) * in + i];
                kept.push_back(std::fabs(Words<T>::to_float(value)) > threshold ? value : T(0));
            }
    for (int& i : active) i = std::max(i, 0);
    constexpr int TILE = 4;  // vectors of outputs that are summed together
    constexpr int OUT = Wide<T>::OUT;
    constexpr int AHEAD = 8 * PACK;  // active channels between a prefetch and its use
    const int64_t tiles = (out + OUT * TILE - 1) / (OUT * TILE);
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int row = 0; row < rows; row++) {
            const int first = int(tile) * OUT * TILE;
            const int count = std::min(TILE, (out - first) / OUT);
            __m512 sum[TILE][Wide<T>::VECTORS];
            for (auto& s : sum)
                for (auto& v : s) v = zero();
            for (size_t at = 0; at < active.size(); at += PACK) {
                if (!row && at + AHEAD < active.size())
                    for (int k = 0; k < PACK; k++)
                        for (int n = 0; n < count; n++) {
                            const int64_t channel = active[at + AHEAD + k];
                            _mm_prefetch((const char*)(w + channel * out + first + n * OUT),
                                         _MM_HINT_T0);
                        }
                for (int n = 0; n < count; n++)
                    Wide<T>::add(sum[n], w + int64_t(active[at]) * out + first + n * OUT,
                                 w + int64_t(active[at + PACK - 1]) * out + first + n * OUT,
                                 &kept[(at / PACK * rows + row) * PACK]);
            }
            for (int n = 0; n < count; n++)
                Wide<T>::store(y + int64_t(row) * out + first + n * OUT, sum[n]);
        }
}

}  // namespace cpu

#define SPARSE(NAME, T)                                                                        \
    extern "C" void sparse_##NAME(const T* x, const T* w, T* y, int rows, int in, int out,     \
                                  float threshold, int threads) {                              \
        cpu::sparse<T>(x, w, y, rows, in, out, threshold, threads);                            \
    }
#define LOW_BIT(NAME, T)                                                                       \
    extern "C" void int8_##NAME(const T* x, const int8_t* w, const float* scale, const float*, \
                                const T* bias, T* y, int rows, int in, int out, int threads) { \
        cpu::low_bit(x, cpu::Weight8{w, scale, 0}, bias, y, rows, in, out, threads);           \
    }                                                                                          \
    extern "C" void int4_##NAME(const T* x, const uint8_t* w, const float* scale,              \
                                const float* offset, const T* bias, T* y, int rows, int in,    \
                                int out, int threads) {                                        \
        cpu::low_bit(x, cpu::Weight4{w, scale, offset, 0}, bias, y, rows, in, out, threads);   \
    }

SPARSE(float, float)
#ifdef __AVX512BF16__
SPARSE(bf16, cpu::bf16)
LOW_BIT(float, float)
LOW_BIT(bf16, cpu::bf16)
#endif

// Projections of drafts: 8-bit and 4-bit weights (see kernels/low_bit.py), and those that read only the input channels
// that count (see kernels/sparse_linear.py). A draft may round what a verification may not: activations become 8 bits.
#include "cpu.h"

#include <memory>
#include <vector>

namespace cpu {

constexpr int GROUP = 128;  // channels whose activations share a scale
constexpr int BLOCK = 64;   // channels in a vector of bytes
constexpr int PARTS = GROUP / BLOCK;

#ifdef __AVX512VNNI__

// Rows of activations in 8 bits, filled up to whole blocks with zeros; the last group may be half a one. `offset`: what the weights' zero point adds to
// a product, per lane; weights are stored without sign.
struct Quantized {
    int blocks, groups;
    std::unique_ptr<int8_t[]> values;  // [row][channel]
    std::vector<float> scale;          // [row][group]
    std::vector<int32_t> offset;       // [row][block][lane]
    std::vector<float> whole;          // [row]: the same over all channels, scaled
    __m512i at(int row, int block) const {
        return _mm512_loadu_si512(&values[(size_t(row) * blocks + block) * BLOCK]);
    }
    __m512i start(int row, int block) const {
        return _mm512_loadu_si512(&offset[(size_t(row) * blocks + block) * LANES]);
    }
};

template <class T> Quantized quantized(const T* x, int rows, int in, int zero_point) {
    const int blocks = (in + BLOCK - 1) / BLOCK, groups = (blocks + PARTS - 1) / PARTS;
    const size_t padded = size_t(blocks) * BLOCK;
    Quantized q{blocks, groups, std::unique_ptr<int8_t[]>(new int8_t[rows * padded]), std::vector<float>(size_t(rows) * groups),
                std::vector<int32_t>(rows * padded / 4), std::vector<float>(rows)};
    for (int row = 0; row < rows; row++)
        for (int g = 0; g < groups; g++) {
            auto some = [&](int i) {
                const int left = in - g * GROUP - i;
                return __mmask16(left >= LANES ? 0xffff : left > 0 ? (1u << left) - 1 : 0);
            };
            const T* from = x + int64_t(row) * in + g * GROUP;
            const int size = std::min(GROUP, int(padded) - g * GROUP);
            __m512 most = zero();
            for (int i = 0; i < size; i += LANES)
                most = _mm512_max_ps(most, _mm512_abs_ps(Words<T>::load(from + i, some(i))));
            const float high = _mm512_reduce_max_ps(most);
            q.scale[size_t(row) * groups + g] = high / 127.f;
            const __m512 by = _mm512_set1_ps(high > 0.f ? 127.f / high : 0.f);
            int8_t* to = &q.values[row * padded + g * GROUP];
            for (int i = 0; i < size; i += LANES) {
                __m512i level = _mm512_cvtps_epi32(_mm512_mul_ps(Words<T>::load(from + i, some(i)), by));
                _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtsepi32_epi8(level));
            }
        }
    const __m512i point = _mm512_set1_epi8(char(zero_point));
    for (size_t block = 0; block < rows * padded / BLOCK; block++) {
        __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), point, _mm512_loadu_si512(&q.values[block * BLOCK]));
        _mm512_storeu_si512(&q.offset[block * LANES], _mm512_sub_epi32(_mm512_setzero_si512(), sum));
        q.whole[block / blocks] -= float(_mm512_reduce_add_epi32(sum)) * q.scale[block / blocks * groups + block % blocks / PARTS];
    }
    return q;
}

// Weights of 8 bits: (out, padded), offset by 128, one scale an output.
struct Eight {
    static constexpr int ZERO_POINT = 128;
    static constexpr bool LATE = true;  // the zero point is settled behind the sum
    const uint8_t* weight;
    const float* scale;
    int blocks;
    __m512i load(int64_t out, int block) const { return _mm512_loadu_si512(weight + (out * blocks + block) * BLOCK); }
    float last(int64_t out) const { return scale[out]; }
    const void* place(int64_t out, int block) const { return weight + (out * blocks + block) * BLOCK; }
};

// Weights of 4 bits: of 64 channels the first 32 in the low halves of 32 bytes, the others in the high ones, offset by
// 8; a scale for each 32 of them.
struct Four {
    static constexpr int ZERO_POINT = 8;
    static constexpr bool LATE = false;
    const uint8_t* weight;
    const bf16* scale;
    int blocks;
    __m512i load(int64_t out, int block) const {
        __m256i packed = _mm256_loadu_si256((const __m256i*)place(out, block));
        __m256i low = _mm256_set1_epi8(0xf);
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(packed, low)),
                                  _mm256_and_si256(_mm256_srli_epi16(packed, 4), low), 1);
    }
    __m512 product(__m512i sum, int64_t out, int block) const {
        int32_t both;
        std::memcpy(&both, scale + (out * blocks + block) * 2, 4);
        __m512i each = _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi32(both << 16), _mm512_set1_epi32(both & 0xffff0000));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_castsi512_ps(each));
    }
    float last(int64_t) const { return 1.f; }
    const void* place(int64_t out, int block) const { return weight + (out * blocks + block) * (BLOCK / 2); }
};

// R rows and OUT outputs at once.
template <class T, class W, int R, int OUT>
void cell(const Quantized& x, const W& w, const T* bias, T* y, int row, int rows, int64_t first, int64_t end, int out) {
    __m512 sum[R][OUT];
    for (int r = 0; r < R; r++)
        for (int o = 0; o < OUT; o++) sum[r][o] = zero();
    for (int g = 0; g < x.groups; g++) {
        __m512i whole[R][OUT];
        __m512 part[R][OUT];
        for (int b = g * PARTS; b < std::min((g + 1) * PARTS, x.blocks); b++) {
            const bool fresh = b == g * PARTS;
            __m512i a[R], start[R];
            for (int r = 0; r < R; r++) {
                const int at = std::min(row + r, rows - 1);
                a[r] = x.at(at, b);
                start[r] = W::LATE ? _mm512_setzero_si512() : x.start(at, b);
            }
            for (int o = 0; o < OUT; o++) {
                const int64_t at = std::min(first + o, end - 1);
                const __m512i weight = w.load(at, b);
                if (!row) _mm_prefetch((const char*)w.place(at + 4 * OUT, b), _MM_HINT_T1);
                for (int r = 0; r < R; r++)
                    if constexpr (W::LATE)
                        whole[r][o] = _mm512_dpbusd_epi32(fresh ? start[r] : whole[r][o], weight, a[r]);
                    else {
                        __m512 p = w.product(_mm512_dpbusd_epi32(start[r], weight, a[r]), at, b);
                        part[r][o] = fresh ? p : _mm512_add_ps(part[r][o], p);
                    }
            }
        }
        for (int r = 0; r < R; r++) {
            const __m512 scale = _mm512_set1_ps(x.scale[size_t(std::min(row + r, rows - 1)) * x.groups + g]);
            for (int o = 0; o < OUT; o++)
                sum[r][o] = _mm512_fmadd_ps(W::LATE ? _mm512_cvtepi32_ps(whole[r][o]) : part[r][o], scale, sum[r][o]);
        }
    }
    for (int r = 0; r < R && row + r < rows; r++)
        for (int o = 0; o < OUT && first + o < end; o++) {
            float value = _mm512_reduce_add_ps(sum[r][o]);
            if (W::LATE) value += x.whole[row + r];
            value *= w.last(first + o);
            if (bias) value += Words<T>::from(bias[first + o]);
            y[int64_t(row + r) * out + first + o] = Words<T>::one(value);
        }
}

template <class T, class W>
void low_bit(const T* x, W w, const T* bias, T* y, int rows, int in, int out, int threads) {
    const Quantized q = quantized(x, rows, in, W::ZERO_POINT);
    w.blocks = q.blocks;
#pragma omp parallel num_threads(threads)
    {
        const int64_t n = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t first = out * me / n, end = out * (me + 1) / n;
        if (rows == 1)
            for (int64_t o = first; o < end; o += 4) cell<T, W, 1, 4>(q, w, bias, y, 0, rows, o, end, out);
        else
            for (int64_t o = first; o < end; o += 2)
                for (int row = 0; row < rows; row += 4) cell<T, W, 4, 2>(q, w, bias, y, row, rows, o, end, out);
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
    extern "C" void int8_##NAME(const T* x, const uint8_t* w, const float* scale, const T* bias, T* y, int rows,       \
                                int in, int out, int threads) {                                                        \
        cpu::low_bit(x, cpu::Eight{w, scale, 0}, bias, y, rows, in, out, threads);                                     \
    }                                                                                                                  \
    extern "C" void int4_##NAME(const T* x, const uint8_t* w, const cpu::bf16* scale, const T* bias, T* y, int rows,   \
                                int in, int out, int threads) {                                                        \
        cpu::low_bit(x, cpu::Four{w, scale, 0}, bias, y, rows, in, out, threads);                                      \
    }

DRAFTS(float, float)
#ifdef __AVX512VNNI__
LOW_BITS(float, float)
#endif
#ifdef __AVX512BF16__
DRAFTS(bf16, cpu::bf16)
#ifdef __AVX512VNNI__
LOW_BITS(bf16, cpu::bf16)
#endif
#endif

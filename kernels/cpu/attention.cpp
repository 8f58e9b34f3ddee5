// Attention of a few new tokens per row over two segments; kernels/attention.py defines it.
//
// A task is one KV head of one row, or of one prefix with all rows that share it, over CHUNK
// entries that start at a multiple of CHUNK. Keys and values are read once for all queries of a
// task. The result of a query depends only on the query and on the entries it sees: not on other
// queries, other rows or the number of threads.
#include "common.h"

#include <memory>
#include <vector>

namespace cpu {

constexpr int BLOCK = 64;    // entries whose scores are computed together
constexpr int CHUNK = 1024;  // entries of a task
constexpr int GROUPS = BLOCK / LANES;

// Transpose of 16 × 16 words.
inline void transpose(__m512i r[LANES]) {
    __m512i t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 2; k++) {
            r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + k + 2]);
            r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + k + 2]);
        }
    for (int i = 0; i < LANES; i += 8)
        for (int k = 0; k < 4; k++) {
            t[i + k] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0x88);
            t[i + k + 4] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0xdd);
        }
    for (int k = 0; k < 8; k++) {
        r[k] = _mm512_shuffle_i32x4(t[k], t[k + 8], 0x88);
        r[k + 8] = _mm512_shuffle_i32x4(t[k], t[k + 8], 0xdd);
    }
}

// One segment's keys and values in memory. Strides are in elements.
template <class T> struct Segment {
    const T *key, *value;
    int64_t row_stride, head_stride;
};

// A thread's working memory.
template <class T> struct Scratch {
    std::vector<__m512i> keys;  // [group][word]: 16 entries, transposed
    std::vector<T> values;      // BLOCK entries; in bfloat16 pairs of entries are interleaved
    std::vector<T> weights;     // [query][BLOCK]
    std::vector<__m512> sums;   // [query]: sum of its weights, lane by lane
    Scratch(int dim, int queries)
        : keys(GROUPS * dim / Words<T>::PACK), values(BLOCK * dim),
          weights(size_t(queries) * BLOCK), sums(queries) {}
};

// Prefetch of the next block, a few cache lines in each step of the products. All at once, the
// prefetches would saturate memory while the products wait, and then leave it idle.
struct Prefetcher {
    const char* at;
    int lines;  // cache lines of 64 bytes per step
    void step() {
        for (int i = 0; i < lines; i++) _mm_prefetch(at + 64 * i, _MM_HINT_T1);
        at += 64 * lines;
    }
};

template <class T> void load_keys(Scratch<T>& s, const T* key, int dim, int count) {
    const int words = dim / Words<T>::PACK;
    for (int g = 0; g < GROUPS; g++)
        for (int w = 0; w < words; w += LANES) {
            __m512i r[LANES];
            for (int i = 0; i < LANES; i++) {
                int entry = g * LANES + i;
                r[i] = entry < count
                           ? _mm512_loadu_si512((const int32_t*)(key + int64_t(entry) * dim) + w)
                           : _mm512_setzero_si512();
            }
            transpose(r);
            for (int i = 0; i < LANES; i++)
                _mm512_storeu_si512(&s.keys[g * words + w + i], r[i]);
        }
}

// Index of dimension d in a sum of weighted values: in bfloat16 the interleaving permutes them.
template <class T> int interleaved_index(int d) {
    if (Words<T>::PACK == 1) return d;
    return d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4;
}

inline void load_values(Scratch<float>& s, const float* value, int dim, int count) {
    std::memcpy(s.values.data(), value, sizeof(float) * dim * count);
    std::memset(s.values.data() + dim * count, 0, sizeof(float) * dim * (BLOCK - count));
}

#ifdef __AVX512BF16__
inline void load_values(Scratch<bf16>& s, const bf16* value, int dim, int count) {
    for (int entry = 0; entry < BLOCK; entry += 2)
        for (int d = 0; d < dim; d += 32) {
            const bf16* at = value + int64_t(entry) * dim + d;
            __m512i a = entry < count ? _mm512_loadu_si512(at) : _mm512_setzero_si512();
            __m512i b = entry + 1 < count ? _mm512_loadu_si512(at + dim) : _mm512_setzero_si512();
            bf16* to = &s.values[entry * dim + 2 * d];
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(a, b));
        }
}
#endif

// Turns the scores of N queries, masked behind `last`, into softmax weights 2^(score - row_max).
// `row_max` is raised only when a score exceeds it by SLACK, so few blocks need the maximum over
// their 64 scores. `rescale` is the factor that earlier weights are multiplied by.
constexpr float SLACK = 8;

template <class T, int N>
void score(Scratch<T>& s, const T* const* query, const int* last, int first, int dim, float scale,
           float* row_max, __m512* row_sum, float* rescale, T* weights, Prefetcher& prefetcher) {
    const int words = dim / Words<T>::PACK;
    __m512 sum[N][GROUPS];
    for (int n = 0; n < N; n++)
        for (int g = 0; g < GROUPS; g++) sum[n][g] = zero();
    for (int w = 0; w < words; w++) {
        prefetcher.step();
        __m512i k[GROUPS];
        for (int g = 0; g < GROUPS; g++) k[g] = s.keys[g * words + w];
        for (int n = 0; n < N; n++) {
            __m512i q = _mm512_set1_epi32(((const int32_t*)query[n])[w]);
            for (int g = 0; g < GROUPS; g++) sum[n][g] = Words<T>::dot(sum[n][g], k[g], q);
        }
    }
    for (int n = 0; n < N; n++) {
        const int visible = std::clamp(last[n] - first + 1, 0, BLOCK);
        if (!visible) {
            rescale[n] = 1.f;
            std::memset(weights + n * BLOCK, 0, sizeof(T) * BLOCK);
            continue;
        }
        __mmask16 mask[GROUPS];
        for (int g = 0; g < GROUPS; g++)
            mask[g] = __mmask16((1u << std::clamp(visible - g * LANES, 0, LANES)) - 1);
        if (visible < BLOCK)
            for (int g = 0; g < GROUPS; g++)
                sum[n][g] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask[g], sum[n][g]);
        const __m512 block_max = _mm512_mul_ps(
            _mm512_set1_ps(scale), _mm512_max_ps(_mm512_max_ps(sum[n][0], sum[n][1]),
                                                 _mm512_max_ps(sum[n][2], sum[n][3])));
        rescale[n] = 1.f;
        if (_mm512_cmp_ps_mask(block_max, _mm512_set1_ps(row_max[n] + SLACK), _CMP_GT_OQ)) {
            const float raised = _mm512_reduce_max_ps(block_max);
            rescale[n] = std::exp2(row_max[n] - raised);
            row_max[n] = raised;
            row_sum[n] = _mm512_mul_ps(row_sum[n], _mm512_set1_ps(rescale[n]));
        }
        for (int g = 0; g < GROUPS; g++) {
            __m512 e = Words<T>::softmax_exp2(_mm512_fmsub_ps(sum[n][g], _mm512_set1_ps(scale),
                                                              _mm512_set1_ps(row_max[n])));
            if (visible < BLOCK) e = _mm512_maskz_mov_ps(mask[g], e);
            row_sum[n] = _mm512_add_ps(row_sum[n], e);
            Words<T>::store(weights + n * BLOCK + g * LANES, e);
        }
    }
}
static_assert(GROUPS == 4, "block_max is the maximum of four vectors");

// Adds the weighted values of a block to the outputs of N queries.
template <class T, int N>
void add_values(Scratch<T>& s, int dim, const float* rescale, float* out, const T* weights,
                Prefetcher& prefetcher) {
    constexpr int PACK = Words<T>::PACK, WIDE = 4;
    for (int d = 0; d < dim; d += LANES * WIDE) {
        const int wide = std::min(WIDE, (dim - d) / LANES);
        __m512 sum[N][WIDE];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < WIDE; v++)
                sum[n][v] = v < wide ? _mm512_mul_ps(_mm512_loadu_ps(out + n * dim + d + v * LANES),
                                                     _mm512_set1_ps(rescale[n]))
                                     : zero();
        for (int entry = 0; entry < BLOCK; entry += PACK) {
            prefetcher.step();
            __m512i v[WIDE];
            const int32_t* from = (const int32_t*)&s.values[entry * dim + PACK * d];
            for (int i = 0; i < WIDE; i++)
                v[i] = i < wide ? _mm512_loadu_si512(from + i * LANES) : _mm512_setzero_si512();
            for (int n = 0; n < N; n++) {
                __m512i p = _mm512_set1_epi32(*(const int32_t*)(weights + n * BLOCK + entry));
                for (int i = 0; i < WIDE; i++) sum[n][i] = Words<T>::dot(sum[n][i], v[i], p);
            }
        }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < wide; v++)
                _mm512_storeu_ps(out + n * dim + d + v * LANES, sum[n][v]);
    }
}

constexpr int MAX_QUERIES = 6;  // queries whose sums fit into the registers

// Calls f<N>(first) over all queries, MAX_QUERIES at a time.
template <class F> void for_query_blocks(int count, F f) {
    int n = 0;
    for (; n + MAX_QUERIES <= count; n += MAX_QUERIES)
        f(std::integral_constant<int, MAX_QUERIES>(), n);
    switch (count - n) {
        case 5: f(std::integral_constant<int, 5>(), n); break;
        case 4: f(std::integral_constant<int, 4>(), n); break;
        case 3: f(std::integral_constant<int, 3>(), n); break;
        case 2: f(std::integral_constant<int, 2>(), n); break;
        case 1: f(std::integral_constant<int, 1>(), n); break;
    }
}

// Partial attention of some queries: unnormalized outputs, and each query's maximum and sum.
struct Partial {
    float *out, *row_max, *row_sum;
    void clear(int queries, int dim) const {
        std::fill_n(out, size_t(queries) * dim, 0.f);
        std::fill_n(row_max, queries, -INFINITY);
        std::fill_n(row_sum, queries, 0.f);
    }
};

// Adds the attention to `count` entries to a partial; the first is the segment's entry `first`.
template <class T>
void attend(Scratch<T>& s, const T* key, const T* value, int first, int count, int queries,
            const T* const* query, const int* last, int dim, float scale, Partial partial) {
    std::vector<float> rescale(queries);
    for (int n = 0; n < queries; n++)
        s.sums[n] = _mm512_maskz_mov_ps(1, _mm512_set1_ps(partial.row_sum[n]));
    scale *= 1.44269504f;  // log2 e
    for (int at = 0; at < count; at += BLOCK) {
        const int entries = std::min(BLOCK, count - at);
        load_keys(s, key + int64_t(at) * dim, dim, entries);
        load_values(s, value + int64_t(at) * dim, dim, entries);
        const int steps = (queries + MAX_QUERIES - 1) / MAX_QUERIES * (dim / Words<T>::PACK);
        const int lines = BLOCK * dim * sizeof(T) / 64;
        const int lines_per_step = (lines + steps - 1) / steps;
        Prefetcher keys{(const char*)(key + int64_t(at + BLOCK) * dim), lines_per_step};
        Prefetcher values{(const char*)(value + int64_t(at + BLOCK) * dim), lines_per_step};
        for_query_blocks(queries, [&](auto N, int n) {
            if (*std::max_element(last + n, last + n + N) < first + at) return;
            score<T, N()>(s, query + n, last + n, first + at, dim, scale, partial.row_max + n,
                          &s.sums[n], &rescale[n], &s.weights[n * BLOCK], keys);
            add_values<T, N()>(s, dim, &rescale[n], partial.out + size_t(n) * dim,
                               &s.weights[n * BLOCK], values);
        });
    }
    for (int n = 0; n < queries; n++) partial.row_sum[n] = _mm512_reduce_add_ps(s.sums[n]);
}

struct Task {
    int prefix, row;  // one of the two is -1
    int head, chunk;
};

struct Shape {
    int rows, heads, kv_heads, width, dim, prefixes;
    float scale;
    const int64_t *lengths, *prefix_of_row, *prefix_lengths;
    int group() const { return heads / kv_heads; }
    int packed() const { return group() * width; }  // queries of a row that share a KV head
    static int chunks(int64_t entries) { return int((entries + CHUNK - 1) / CHUNK); }
};

template <class T>
void attend_rows(Shape shape, const T* query, Segment<T> own, Segment<T> prefix, T* out,
                 float* logsumexp, int threads) {
    const int packed = shape.packed(), dim = shape.dim;
    std::vector<std::vector<int>> members(shape.prefixes);
    for (int row = 0; row < shape.rows; row++)
        if (shape.prefixes && shape.prefix_of_row[row] >= 0)
            members[shape.prefix_of_row[row]].push_back(row);
    // partials of each row and head: its prefix's chunks, then its own
    std::vector<Task> tasks;
    std::vector<int> begin(shape.rows + 1, 0);
    int largest_group = 1;
    for (int p = 0; p < shape.prefixes; p++)
        if (!members[p].empty()) {
            largest_group = std::max(largest_group, int(members[p].size()));
            for (int h = 0; h < shape.kv_heads; h++)
                for (int c = 0; c < Shape::chunks(shape.prefix_lengths[p]); c++)
                    tasks.push_back({p, -1, h, c});
        }
    auto prefix_chunks = [&](int row) {
        const int64_t p = shape.prefixes ? shape.prefix_of_row[row] : -1;
        return p < 0 ? 0 : Shape::chunks(shape.prefix_lengths[p]);
    };
    for (int row = 0; row < shape.rows; row++) {
        const int own_chunks = Shape::chunks(shape.lengths[row] + shape.width);
        begin[row + 1] = begin[row] + prefix_chunks(row) + own_chunks;
        for (int h = 0; h < shape.kv_heads; h++)
            for (int c = 0; c < own_chunks; c++) tasks.push_back({-1, row, h, c});
    }
    const size_t partials = size_t(begin[shape.rows]) * shape.kv_heads * packed;
    std::unique_ptr<float[]> space(new float[partials * (dim + 2)]);
    auto partial_of = [&](int row, int head, int index) {
        const size_t n = (size_t(begin[row]) * shape.kv_heads +
                          size_t(head) * (begin[row + 1] - begin[row]) + index) *
                         packed;
        return Partial{&space[n * dim], &space[partials * dim + n],
                       &space[partials * (dim + 1) + n]};
    };
#pragma omp parallel num_threads(threads)
    {
        Scratch<T> s(dim, largest_group * packed);
        std::vector<const T*> queries(largest_group * packed);
        std::vector<int> last(largest_group * packed);
        std::vector<float> results(size_t(largest_group) * packed * (dim + 2));
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size(); i++) {
            const Task task = tasks[i];
            const int first = task.chunk * CHUNK;
            const int single_row[] = {task.row};
            const int* rows = task.row >= 0 ? single_row : members[task.prefix].data();
            const int count = task.row >= 0 ? 1 : int(members[task.prefix].size());
            for (int r = 0; r < count; r++)
                for (int n = 0; n < packed; n++) {
                    const int row = rows[r];
                    queries[r * packed + n] =
                        query + (size_t(row) * shape.heads * shape.width +
                                 size_t(task.head) * packed + n) *
                                    dim;
                    last[r * packed + n] =
                        int(task.row >= 0 ? shape.lengths[row] + n % shape.width
                                          : shape.prefix_lengths[task.prefix] - 1);
                }
            const int64_t entries = task.row >= 0 ? shape.lengths[task.row] + shape.width
                                                  : shape.prefix_lengths[task.prefix];
            const Segment<T>& from = task.row >= 0 ? own : prefix;
            const int64_t offset = (task.row >= 0 ? task.row : task.prefix) * from.row_stride +
                                   task.head * from.head_stride + int64_t(first) * dim;
            const Partial all{results.data(), &results[size_t(largest_group) * packed * dim],
                              &results[size_t(largest_group) * packed * (dim + 1)]};
            all.clear(count * packed, dim);
            attend(s, from.key + offset, from.value + offset, first,
                   int(std::min<int64_t>(CHUNK, entries - first)), count * packed, queries.data(),
                   last.data(), dim, shape.scale, all);
            for (int r = 0; r < count; r++) {
                Partial to = partial_of(
                    rows[r], task.head,
                    task.chunk + (task.row >= 0 ? prefix_chunks(task.row) : 0));
                std::copy_n(all.out + size_t(r) * packed * dim, size_t(packed) * dim, to.out);
                std::copy_n(all.row_max + r * packed, packed, to.row_max);
                std::copy_n(all.row_sum + r * packed, packed, to.row_sum);
            }
        }
        // merge the partials of each row and head in the order of their chunks
#pragma omp for
        for (int i = 0; i < shape.rows * shape.kv_heads; i++) {
            const int row = i / shape.kv_heads, head = i % shape.kv_heads;
            const int count = begin[row + 1] - begin[row];
            for (int n = 0; n < packed; n++) {
                float row_max = -INFINITY, row_sum = 0;
                for (int c = 0; c < count; c++)
                    row_max = std::max(row_max, partial_of(row, head, c).row_max[n]);
                std::fill_n(results.data(), dim, 0.f);
                for (int c = 0; c < count; c++) {
                    const Partial partial = partial_of(row, head, c);
                    if (partial.row_sum[n] == 0.f) continue;  // no entry was visible
                    const float share = std::exp2(partial.row_max[n] - row_max);
                    row_sum += share * partial.row_sum[n];
                    for (int d = 0; d < dim; d++)
                        results[d] += share * partial.out[size_t(n) * dim + d];
                }
                const size_t to =
                    size_t(row) * shape.heads * shape.width + size_t(head) * packed + n;
                for (int d = 0; d < dim; d++)
                    out[to * dim + d] =
                        Words<T>::from_float(results[interleaved_index<T>(d)] / row_sum);
                logsumexp[to] = row_max * 0.693147181f + std::log(row_sum);  // ln 2
            }
        }
    }
}

// One of the segments that a prefill chunk attends to. The last is the chunk itself, of which token
// t sees the entries up to t. kernels/cpu/attention.py fills an array of this struct.
template <class T> struct ChunkSegment {
    const T *key, *value;
    int64_t head_stride, count;
};

template <class T>
void attend_chunk(const T* query, const ChunkSegment<T>* segments, int num_segments, int heads,
                  int kv_heads, int width, int dim, float scale, T* out, float* logsumexp,
                  int threads) {
    constexpr int TOKENS = 64;  // whose queries read the keys together
    const int group = heads / kv_heads, tiles = (width + TOKENS - 1) / TOKENS;
#pragma omp parallel num_threads(threads)
    {
        const int max_queries = TOKENS * group;
        Scratch<T> s(dim, max_queries);
        std::vector<float> results(size_t(max_queries) * (dim + 2));
        const Partial partial{results.data(), &results[size_t(max_queries) * dim],
                              &results[size_t(max_queries) * (dim + 1)]};
        std::vector<const T*> queries(max_queries);
        std::vector<int> last(max_queries);
        std::vector<size_t> index(max_queries);  // of each query in the output
#pragma omp for schedule(dynamic, 1)
        for (int i = tiles * kv_heads - 1; i >= 0; i--) {  // the longest tasks first
            const int head = i % kv_heads, first = i / kv_heads * TOKENS;
            const int tokens = std::min(TOKENS, width - first);
            for (int n = 0; n < tokens * group; n++) {
                index[n] = size_t(head * group + n / tokens) * width + first + n % tokens;
                queries[n] = query + index[n] * dim;
            }
            partial.clear(tokens * group, dim);
            for (int k = 0; k < num_segments; k++) {
                const bool causal = k + 1 == num_segments;
                const int64_t offset = head * segments[k].head_stride;
                const int64_t count = causal ? first + tokens : segments[k].count;
                for (int n = 0; n < tokens * group; n++)
                    last[n] = causal ? first + n % tokens : int(count) - 1;
                attend(s, segments[k].key + offset, segments[k].value + offset, 0, int(count),
                       tokens * group, queries.data(), last.data(), dim, scale, partial);
            }
            for (int n = 0; n < tokens * group; n++) {
                for (int d = 0; d < dim; d++)
                    out[index[n] * dim + d] = Words<T>::from_float(
                        partial.out[size_t(n) * dim + interleaved_index<T>(d)] /
                        partial.row_sum[n]);
                logsumexp[index[n]] =
                    partial.row_max[n] * 0.693147181f + std::log(partial.row_sum[n]);
            }
        }
    }
}

// Copies `width` new entries per row behind its first `lengths[row]` cache entries.
template <class T>
void write_rows(const T* from, int64_t row_stride, int64_t head_stride, int64_t token_stride,
                T* cache, int64_t cache_row_stride, int64_t cache_head_stride,
                const int64_t* lengths, int rows, int kv_heads, int width, int dim) {
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < kv_heads; head++)
            for (int t = 0; t < width; t++)
                std::copy_n(from + row * row_stride + head * head_stride + t * token_stride, dim,
                            cache + row * cache_row_stride + head * cache_head_stride +
                                (lengths[row] + t) * dim);
}

}  // namespace cpu

#define KERNELS(NAME, T)                                                                          \
    extern "C" void attend_rows_##NAME(                                                           \
        const T* query, const T* key, const T* value, int64_t row_stride, int64_t head_stride,    \
        const T* prefix_key, const T* prefix_value, int64_t prefix_stride,                        \
        int64_t prefix_head_stride, const int64_t* lengths, const int64_t* prefix_of_row,         \
        const int64_t* prefix_lengths, int rows, int heads, int kv_heads, int width, int dim,     \
        int prefixes, float scale, T* out, float* logsumexp, int threads) {                       \
        cpu::attend_rows<T>({rows, heads, kv_heads, width, dim, prefixes, scale, lengths,         \
                             prefix_of_row, prefix_lengths},                                      \
                            query, {key, value, row_stride, head_stride},                         \
                            {prefix_key, prefix_value, prefix_stride, prefix_head_stride}, out,   \
                            logsumexp, threads);                                                  \
    }                                                                                             \
    extern "C" void attend_chunk_##NAME(                                                          \
        const T* query, const cpu::ChunkSegment<T>* segments, int num_segments, int heads,        \
        int kv_heads, int width, int dim, float scale, T* out, float* logsumexp, int threads) {   \
        cpu::attend_chunk<T>(query, segments, num_segments, heads, kv_heads, width, dim, scale,   \
                             out, logsumexp, threads);                                            \
    }                                                                                             \
    extern "C" void write_rows_##NAME(                                                            \
        const T* from, int64_t row_stride, int64_t head_stride, int64_t token_stride, T* cache,   \
        int64_t cache_row_stride, int64_t cache_head_stride, const int64_t* lengths, int rows,    \
        int kv_heads, int width, int dim) {                                                       \
        cpu::write_rows<T>(from, row_stride, head_stride, token_stride, cache, cache_row_stride,  \
                           cache_head_stride, lengths, rows, kv_heads, width, dim);               \
    }

KERNELS(float, float)
#ifdef __AVX512BF16__
KERNELS(bf16, cpu::bf16)
#endif

// Attention of a few new tokens per row over two segments (see kernels/attention.py, which defines it).
//
// A task is one KV head of one row, or of one prefix with all rows that share it, over CHUNK entries at an absolute place.
// Keys and values are read once for all queries of a task. A query's result depends on nothing but itself and the
// entries it sees: not on the other queries, the other rows or the number of threads.
#include "common.h"

#include <memory>
#include <vector>

namespace cpu {

constexpr int BLOCK = 64;    // entries whose scores are held together
constexpr int CHUNK = 1024;  // entries of a task
constexpr int GROUPS = BLOCK / LANES;

// 16 × 16 words
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

// One segment's keys and values as they lie in memory, and what may be read of them.
template <class T> struct Segment {
    const T *key, *value;
    int64_t row_stride, head_stride;
};

// A thread's own memory.
template <class T> struct Scratch {
    std::vector<__m512i> keys;    // [group][word] of 16 entries
    std::vector<T> values;        // BLOCK entries; pairs of entries word by word if two elements make a word
    std::vector<T> weights;       // [query][BLOCK]
    std::vector<__m512> totals;   // of a query's weights, lane by lane
    Scratch(int dim, int queries)
        : keys(GROUPS * dim / Words<T>::PACK), values(BLOCK * dim), weights(size_t(queries) * BLOCK), totals(queries) {}
};

// Fetches the block behind this one, a few lines in each step of the products: all at once they would wait for memory,
// and memory then for them.
struct Ahead {
    const char* at;
    int lines;  // of 64 bytes, in each step
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
                r[i] = entry < count ? _mm512_loadu_si512((const int32_t*)(key + int64_t(entry) * dim) + w)
                                     : _mm512_setzero_si512();
            }
            transpose(r);
            for (int i = 0; i < LANES; i++) _mm512_storeu_si512(&s.keys[g * words + w + i], r[i]);
        }
}

// Where a sum of weighted values stands among its `dim` neighbours: interleaving leaves them in this order.
template <class T> int place(int d) {
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

// The scores of N queries, masked behind `last`, become weights: 2 to the power of what they are above `top`. That is a
// maximum which a score may exceed by SLACK before it is raised: hardly a block then needs one number of its 64.
constexpr float SLACK = 8;

template <class T, int N>
void score(Scratch<T>& s, const T* const* query, const int* last, int first, int dim, float scale, float* top,
           __m512* total, float* fade, T* weights, Ahead& ahead) {
    const int words = dim / Words<T>::PACK;
    __m512 sum[N][GROUPS];
    for (int n = 0; n < N; n++)
        for (int g = 0; g < GROUPS; g++) sum[n][g] = zero();
    for (int w = 0; w < words; w++) {
        ahead.step();
        __m512i k[GROUPS];
        for (int g = 0; g < GROUPS; g++) k[g] = s.keys[g * words + w];
        for (int n = 0; n < N; n++) {
            __m512i q = _mm512_set1_epi32(((const int32_t*)query[n])[w]);
            for (int g = 0; g < GROUPS; g++) sum[n][g] = Words<T>::dot(sum[n][g], k[g], q);
        }
    }
    for (int n = 0; n < N; n++) {
        const int seen = std::clamp(last[n] - first + 1, 0, BLOCK);
        if (!seen) {
            fade[n] = 1.f;
            std::memset(weights + n * BLOCK, 0, sizeof(T) * BLOCK);
            continue;
        }
        __mmask16 here[GROUPS];
        for (int g = 0; g < GROUPS; g++) here[g] = __mmask16((1u << std::clamp(seen - g * LANES, 0, LANES)) - 1);
        if (seen < BLOCK)
            for (int g = 0; g < GROUPS; g++)
                sum[n][g] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), here[g], sum[n][g]);
        const __m512 most = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_max_ps(_mm512_max_ps(sum[n][0], sum[n][1]),
                                                                               _mm512_max_ps(sum[n][2], sum[n][3])));
        fade[n] = 1.f;
        if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(top[n] + SLACK), _CMP_GT_OQ)) {
            const float high = _mm512_reduce_max_ps(most);
            fade[n] = std::exp2(top[n] - high);
            top[n] = high;
            total[n] = _mm512_mul_ps(total[n], _mm512_set1_ps(fade[n]));
        }
        for (int g = 0; g < GROUPS; g++) {
            __m512 e = Words<T>::power(_mm512_fmsub_ps(sum[n][g], _mm512_set1_ps(scale), _mm512_set1_ps(top[n])));
            if (seen < BLOCK) e = _mm512_maskz_mov_ps(here[g], e);
            total[n] = _mm512_add_ps(total[n], e);
            Words<T>::store(weights + n * BLOCK + g * LANES, e);
        }
    }
}
static_assert(GROUPS == 4, "the maximum is of four");

// Adds the weighted values of a block to N queries' sums.
template <class T, int N>
void add_values(Scratch<T>& s, int dim, const float* fade, float* out, const T* weights, Ahead& ahead) {
    constexpr int PACK = Words<T>::PACK, WIDE = 4;
    for (int d = 0; d < dim; d += LANES * WIDE) {
        const int wide = std::min(WIDE, (dim - d) / LANES);
        __m512 sum[N][WIDE];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < WIDE; v++)
                sum[n][v] = v < wide ? _mm512_mul_ps(_mm512_loadu_ps(out + n * dim + d + v * LANES),
                                                     _mm512_set1_ps(fade[n]))
                                     : zero();
        for (int entry = 0; entry < BLOCK; entry += PACK) {
            ahead.step();
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
            for (int v = 0; v < wide; v++) _mm512_storeu_ps(out + n * dim + d + v * LANES, sum[n][v]);
    }
}

constexpr int MOST = 6;  // queries whose sums stay in registers

// Calls f<N>(first) over all queries, MOST at a time.
template <class F> void by_some(int count, F f) {
    int n = 0;
    for (; n + MOST <= count; n += MOST) f(std::integral_constant<int, MOST>(), n);
    switch (count - n) {
        case 5: f(std::integral_constant<int, 5>(), n); break;
        case 4: f(std::integral_constant<int, 4>(), n); break;
        case 3: f(std::integral_constant<int, 3>(), n); break;
        case 2: f(std::integral_constant<int, 2>(), n); break;
        case 1: f(std::integral_constant<int, 1>(), n); break;
    }
}

// What some entries gave some queries: weighted values that are not divided yet, and of each the maximum and total.
struct Part {
    float *out, *top, *total;
    void clear(int queries, int dim) const {
        std::fill_n(out, size_t(queries) * dim, 0.f);
        std::fill_n(top, queries, -INFINITY);
        std::fill_n(total, queries, 0.f);
    }
};

// Adds to a part what `count` entries give, of which the first is the segment's entry `first`.
template <class T>
void attend(Scratch<T>& s, const T* key, const T* value, int first, int count, int queries, const T* const* query,
            const int* last, int dim, float scale, Part part) {
    std::vector<float> fade(queries);
    for (int n = 0; n < queries; n++) s.totals[n] = _mm512_maskz_mov_ps(1, _mm512_set1_ps(part.total[n]));
    scale *= 1.44269504f;
    for (int at = 0; at < count; at += BLOCK) {
        const int here = std::min(BLOCK, count - at);
        load_keys(s, key + int64_t(at) * dim, dim, here);
        load_values(s, value + int64_t(at) * dim, dim, here);
        const int steps = (queries + MOST - 1) / MOST * (dim / Words<T>::PACK), lines = BLOCK * dim * sizeof(T) / 64;
        const int each = (lines + steps - 1) / steps;
        Ahead keys{(const char*)(key + int64_t(at + BLOCK) * dim), each};
        Ahead values{(const char*)(value + int64_t(at + BLOCK) * dim), each};
        by_some(queries, [&](auto N, int n) {
            if (*std::max_element(last + n, last + n + N) < first + at) return;
            score<T, N()>(s, query + n, last + n, first + at, dim, scale, part.top + n, &s.totals[n], &fade[n],
                          &s.weights[n * BLOCK], keys);
            add_values<T, N()>(s, dim, &fade[n], part.out + size_t(n) * dim, &s.weights[n * BLOCK], values);
        });
    }
    for (int n = 0; n < queries; n++) part.total[n] = _mm512_reduce_add_ps(s.totals[n]);
}

struct Task {
    int prefix, row;  // one of them, the other -1
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
void attend_rows(Shape at, const T* query, Segment<T> own, Segment<T> prefix, T* out, float* logsumexp, int threads) {
    const int packed = at.packed(), dim = at.dim;
    std::vector<std::vector<int>> members(at.prefixes);
    for (int row = 0; row < at.rows; row++)
        if (at.prefixes && at.prefix_of_row[row] >= 0) members[at.prefix_of_row[row]].push_back(row);
    // parts of each row and head: its prefix's chunks, then its own
    std::vector<Task> tasks;
    std::vector<int> begin(at.rows + 1, 0);
    int most = 1;
    for (int p = 0; p < at.prefixes; p++)
        if (!members[p].empty()) {
            most = std::max(most, int(members[p].size()));
            for (int h = 0; h < at.kv_heads; h++)
                for (int c = 0; c < Shape::chunks(at.prefix_lengths[p]); c++) tasks.push_back({p, -1, h, c});
        }
    auto before = [&](int row) {
        const int64_t p = at.prefixes ? at.prefix_of_row[row] : -1;
        return p < 0 ? 0 : Shape::chunks(at.prefix_lengths[p]);
    };
    for (int row = 0; row < at.rows; row++) {
        const int own_chunks = Shape::chunks(at.lengths[row] + at.width);
        begin[row + 1] = begin[row] + before(row) + own_chunks;
        for (int h = 0; h < at.kv_heads; h++)
            for (int c = 0; c < own_chunks; c++) tasks.push_back({-1, row, h, c});
    }
    const size_t parts = size_t(begin[at.rows]) * at.kv_heads * packed;
    std::unique_ptr<float[]> space(new float[parts * (dim + 2)]);
    auto part_of = [&](int row, int head, int index) {
        const size_t n = (size_t(begin[row]) * at.kv_heads + size_t(head) * (begin[row + 1] - begin[row]) + index) * packed;
        return Part{&space[n * dim], &space[parts * dim + n], &space[parts * (dim + 1) + n]};
    };
#pragma omp parallel num_threads(threads)
    {
        Scratch<T> s(dim, most * packed);
        std::vector<const T*> queries(most * packed);
        std::vector<int> last(most * packed);
        std::vector<float> results(size_t(most) * packed * (dim + 2));
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size(); i++) {
            const Task task = tasks[i];
            const int first = task.chunk * CHUNK;
            const int lone[] = {task.row};
            const int* rows = task.row >= 0 ? lone : members[task.prefix].data();
            const int count = task.row >= 0 ? 1 : int(members[task.prefix].size());
            for (int r = 0; r < count; r++)
                for (int n = 0; n < packed; n++) {
                    const int row = rows[r];
                    queries[r * packed + n] = query + (size_t(row) * at.heads * at.width + size_t(task.head) * packed + n) * dim;
                    last[r * packed + n] = int(task.row >= 0 ? at.lengths[row] + n % at.width : at.prefix_lengths[task.prefix] - 1);
                }
            const int64_t entries = task.row >= 0 ? at.lengths[task.row] + at.width : at.prefix_lengths[task.prefix];
            const Segment<T>& from = task.row >= 0 ? own : prefix;
            const int64_t offset = (task.row >= 0 ? task.row : task.prefix) * from.row_stride +
                                   task.head * from.head_stride + int64_t(first) * dim;
            const Part whole{results.data(), &results[size_t(most) * packed * dim],
                             &results[size_t(most) * packed * (dim + 1)]};
            whole.clear(count * packed, dim);
            attend(s, from.key + offset, from.value + offset, first, int(std::min<int64_t>(CHUNK, entries - first)),
                   count * packed, queries.data(), last.data(), dim, at.scale, whole);
            for (int r = 0; r < count; r++) {
                Part to = part_of(rows[r], task.head, task.chunk + (task.row >= 0 ? before(task.row) : 0));
                std::copy_n(whole.out + size_t(r) * packed * dim, size_t(packed) * dim, to.out);
                std::copy_n(whole.top + r * packed, packed, to.top);
                std::copy_n(whole.total + r * packed, packed, to.total);
            }
        }
#pragma omp for
        for (int i = 0; i < at.rows * at.kv_heads; i++) {
            const int row = i / at.kv_heads, head = i % at.kv_heads, count = begin[row + 1] - begin[row];
            for (int n = 0; n < packed; n++) {
                float top = -INFINITY, total = 0;
                for (int c = 0; c < count; c++) top = std::max(top, part_of(row, head, c).top[n]);
                std::fill_n(results.data(), dim, 0.f);
                for (int c = 0; c < count; c++) {
                    const Part part = part_of(row, head, c);
                    if (part.total[n] == 0.f) continue;  // saw nothing
                    const float share = std::exp2(part.top[n] - top);
                    total += share * part.total[n];
                    for (int d = 0; d < dim; d++) results[d] += share * part.out[size_t(n) * dim + d];
                }
                const size_t to = size_t(row) * at.heads * at.width + size_t(head) * packed + n;
                for (int d = 0; d < dim; d++) out[to * dim + d] = Words<T>::one(results[place<T>(d)] / total);
                logsumexp[to] = top * 0.693147181f + std::log(total);
            }
        }
    }
}

// A chunk of one prompt over some segments, the last of which is the chunk itself: token t sees its entries up to t.
template <class T> struct Past {
    const T *key, *value;
    int64_t head_stride, count;
};

template <class T>
void attend_chunk(const T* query, const Past<T>* past, int segments, int heads, int kv_heads, int width, int dim,
                  float scale, T* out, float* logsumexp, int threads) {
    constexpr int TOKENS = 64;  // whose queries go over the keys together
    const int group = heads / kv_heads, tiles = (width + TOKENS - 1) / TOKENS;
#pragma omp parallel num_threads(threads)
    {
        const int most = TOKENS * group;
        Scratch<T> s(dim, most);
        std::vector<float> results(size_t(most) * (dim + 2));
        const Part part{results.data(), &results[size_t(most) * dim], &results[size_t(most) * (dim + 1)]};
        std::vector<const T*> queries(most);
        std::vector<int> last(most);
        std::vector<size_t> places(most);
#pragma omp for schedule(dynamic, 1)
        for (int i = tiles * kv_heads - 1; i >= 0; i--) {  // the late tokens, which see most, first
            const int head = i % kv_heads, first = i / kv_heads * TOKENS, tokens = std::min(TOKENS, width - first);
            for (int n = 0; n < tokens * group; n++) {
                places[n] = size_t(head * group + n / tokens) * width + first + n % tokens;
                queries[n] = query + places[n] * dim;
            }
            part.clear(tokens * group, dim);
            for (int k = 0; k < segments; k++) {
                const bool itself = k + 1 == segments;
                const int64_t offset = head * past[k].head_stride, count = itself ? first + tokens : past[k].count;
                for (int n = 0; n < tokens * group; n++) last[n] = itself ? first + n % tokens : int(count) - 1;
                attend(s, past[k].key + offset, past[k].value + offset, 0, int(count), tokens * group, queries.data(),
                       last.data(), dim, scale, part);
            }
            for (int n = 0; n < tokens * group; n++) {
                for (int d = 0; d < dim; d++)
                    out[places[n] * dim + d] = Words<T>::one(part.out[size_t(n) * dim + place<T>(d)] / part.total[n]);
                logsumexp[places[n]] = part.top[n] * 0.693147181f + std::log(part.total[n]);
            }
        }
    }
}

// Entries of a cache behind each row's length.
template <class T>
void write_rows(const T* from, int64_t row_stride, int64_t head_stride, int64_t token_stride, T* to,
                int64_t to_row_stride, int64_t to_head_stride, const int64_t* lengths, int rows, int kv_heads, int width,
                int dim) {
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < kv_heads; head++)
            for (int t = 0; t < width; t++)
                std::copy_n(from + row * row_stride + head * head_stride + t * token_stride, dim,
                            to + row * to_row_stride + head * to_head_stride + (lengths[row] + t) * dim);
}

}  // namespace cpu

#define KERNELS(NAME, T)                                                                                               \
    extern "C" void attend_rows_##NAME(                                                                                \
        const T* query, const T* key, const T* value, int64_t row_stride, int64_t head_stride, const T* prefix_key,    \
        const T* prefix_value, int64_t prefix_stride, int64_t prefix_head_stride, const int64_t* lengths,              \
        const int64_t* prefix_of_row, const int64_t* prefix_lengths, int rows, int heads, int kv_heads, int width,     \
        int dim, int prefixes, float scale, T* out, float* logsumexp, int threads) {                                   \
        cpu::attend_rows<T>({rows, heads, kv_heads, width, dim, prefixes, scale, lengths, prefix_of_row,               \
                             prefix_lengths},                                                                          \
                            query, {key, value, row_stride, head_stride},                                              \
                            {prefix_key, prefix_value, prefix_stride, prefix_head_stride}, out, logsumexp, threads);   \
    }                                                                                                                  \
    extern "C" void attend_chunk_##NAME(const T* query, const cpu::Past<T>* past, int segments, int heads,             \
                                        int kv_heads, int width, int dim, float scale, T* out, float* logsumexp,       \
                                        int threads) {                                                                 \
        cpu::attend_chunk<T>(query, past, segments, heads, kv_heads, width, dim, scale, out, logsumexp, threads);      \
    }                                                                                                                  \
    extern "C" void write_rows_##NAME(const T* from, int64_t row_stride, int64_t head_stride, int64_t token_stride,    \
                                      T* to, int64_t to_row_stride, int64_t to_head_stride, const int64_t* lengths,    \
                                      int rows, int kv_heads, int width, int dim) {                                    \
        cpu::write_rows<T>(from, row_stride, head_stride, token_stride, to, to_row_stride, to_head_stride, lengths,    \
                           rows, kv_heads, width, dim);                                                                \
    }

KERNELS(float, float)
#ifdef __AVX512BF16__
KERNELS(bf16, cpu::bf16)
#endif

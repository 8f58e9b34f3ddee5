// The token that keyed Gumbel noise draws (see kernels/noise.py, which defines it).
//
// A token's noise is -log(-log u), u the uniform number in the upper 53 of its 64 bits. Since -log u >= 1 - u, and
// 1 - u >= 2^-(k + 1) where the bits begin with k < 53 ones, it is at most (k + 1) log 2. The bits are made for every
// token, 16 at once; the logarithms only of those whose score and bound reach what has been found: a few in thousands.
#include <limits>
#include <vector>
#include "common.h"

namespace cpu {

constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15, FIRST = 0xbf58476d1ce4e5b9, SECOND = 0x94d049bb133111eb;
constexpr int PIECE = 8192;  // tokens whose scores stay in the first cache from the highest's search to the drawing

inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * FIRST;
    x = (x ^ x >> 27) * SECOND;
    return x ^ x >> 31;
}

// How many ones 8 tokens' bits begin with.
inline __m256i ones(__m512i x) {
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64(FIRST));
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64(SECOND));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
    return _mm512_cvtepi64_epi32(_mm512_lzcnt_epi64(_mm512_xor_si512(x, _mm512_set1_epi64(-1))));
}

inline float noise(uint64_t key, int token) {
    const uint64_t bits = mixed(key + uint64_t(token) * GOLDEN);
    return float(-std::log(-std::log((double(int64_t(bits >> 11)) + 0.5) * 0x1p-53)));
}

struct Found {
    float sum;
    int token;

    // As argmax has it: what is no number is above all, and the first of equals wins.
    bool below(const Found& o) const {
        if (std::isnan(sum) || std::isnan(o.sum)) return std::isnan(o.sum) && (!std::isnan(sum) || o.token < token);
        return sum < o.sum || (sum == o.sum && o.token < token);
    }
};

inline __mmask16 lanes(int left) { return left >= LANES ? 0xffff : (1u << left) - 1; }

// The highest of `n` scores.
inline Found highest(const float* scores, int n) {
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 most = lowest;
    __mmask16 odd = 0;
    for (int i = 0; i < n; i += LANES) {
        const __m512 s = _mm512_mask_loadu_ps(lowest, lanes(n - i), scores + i);
        odd |= _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q);
        most = _mm512_max_ps(s, most);
    }
    const __m512 wanted = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int i = 0; i < n; i += LANES) {
        const __m512 s = _mm512_mask_loadu_ps(lowest, lanes(n - i), scores + i);
        const __mmask16 here = odd ? _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q) : _mm512_cmp_ps_mask(s, wanted, _CMP_EQ_OQ);
        if (here) return {scores[i + __builtin_ctz(here)], i + __builtin_ctz(here)};
    }
    return {scores[0], 0};
}

// The highest sum of score and noise of `n` tokens.
inline Found drawn(const float* scores, int n, uint64_t key) {
    const __m512 log2 = _mm512_set1_ps(0.6932f);  // above log 2 by more than is rounded away on either side
    const __m512i step = _mm512_set1_epi64(GOLDEN * LANES);
    __m512i low = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(GOLDEN));
    low = _mm512_add_epi64(low, _mm512_set1_epi64(key));
    __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(GOLDEN * 8));
    Found best = highest(scores, n);
    if (std::isnan(best.sum)) return best;
    best.sum += noise(key, best.token);
    for (int i = 0; i < n; i += LANES, low = _mm512_add_epi64(low, step), high = _mm512_add_epi64(high, step)) {
        const __m512i k = _mm512_inserti64x4(_mm512_castsi256_si512(ones(low)), ones(high), 1);
        const __m512 bound = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(k, _mm512_set1_epi32(1))), log2);
        const __m512 most = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes(n - i), scores + i), bound);
        const float least = std::max(best.sum, std::numeric_limits<float>::lowest());  // filtered tokens stay below
        unsigned reach = _mm512_cmp_ps_mask(most, _mm512_set1_ps(least), _CMP_GE_OQ);
        reach |= _mm512_cmpge_epi32_mask(k, _mm512_set1_epi32(53));  // u is rounded to 1: no bound
        for (reach &= lanes(n - i); reach; reach &= reach - 1) {
            const int token = i + __builtin_ctz(reach);
            const Found other{scores[token] + noise(key, token), token};
            if (best.below(other)) best = other;
        }
    }
    return best;
}

struct Draw {
    const float* scores;  // (rows, width, vocabulary)
    const int64_t* seeds;
    const bool* seeded;
    const int64_t *places;
    int64_t* tokens;
    int rows, width, vocabulary;
};

// A piece of each of the rows' places by itself, then the best of each one's pieces.
inline void draw(const Draw& d, int threads) {
    const int pieces = (d.vocabulary + PIECE - 1) / PIECE, lines = d.rows * d.width;
    std::vector<Found> found(size_t(lines) * pieces);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int i = 0; i < lines * pieces; i++) {
        const int line = i / pieces, row = line / d.width, first = i % pieces * PIECE;
        const float* scores = d.scores + int64_t(line) * d.vocabulary + first;
        const int n = std::min(PIECE, d.vocabulary - first);
        const uint64_t key = mixed(mixed(uint64_t(d.seeds[row]) * GOLDEN + 1) + uint64_t(d.places[line]) * GOLDEN);
        found[i] = d.seeded[row] ? drawn(scores, n, key + uint64_t(first) * GOLDEN) : highest(scores, n);
        found[i].token += first;
    }
    for (int line = 0; line < lines; line++) {
        Found best = found[size_t(line) * pieces];
        for (int i = 1; i < pieces; i++)
            if (best.below(found[size_t(line) * pieces + i])) best = found[size_t(line) * pieces + i];
        d.tokens[line] = best.token;
    }
}

}  // namespace cpu

extern "C" void draw_float(const float* scores, const int64_t* seeds, const bool* seeded, const int64_t* places,
                           int64_t* tokens, int rows, int width, int vocabulary, int threads) {
    cpu::draw({scores, seeds, seeded, places, tokens, rows, width, vocabulary}, threads);
}

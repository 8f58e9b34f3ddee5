// Sampling with counter-based Gumbel noise; kernels/gumbel_noise.py defines it.
//
// A token's noise is -log(-log u), where u is a uniform number from the upper 53 of its 64 random
// bits. Since -log u >= 1 - u, and 1 - u >= 2^-(k + 1) if the bits begin with k < 53 ones, the
// noise is at most (k + 1) log 2. The bits are computed for every token, 16 at a time. The
// logarithms are computed only for tokens whose score plus bound reaches the best sum so far: a few
// in thousands.
#include <limits>
#include <vector>
#include "common.h"

namespace cpu {

constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15;
constexpr uint64_t FIRST = 0xbf58476d1ce4e5b9;
constexpr uint64_t SECOND = 0x94d049bb133111eb;
// tokens per task: their scores stay in the L1 cache between the two passes over them
constexpr int PIECE = 8192;

// SplitMix64's finalizer.
inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * FIRST;
    x = (x ^ x >> 27) * SECOND;
    return x ^ x >> 31;
}

// The number of leading ones in the random bits of 8 tokens.
inline __m256i leading_ones(__m512i x) {
    const __m512i first = _mm512_set1_epi64(FIRST), second = _mm512_set1_epi64(SECOND);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), first);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), second);
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
    __m512i inverted = _mm512_xor_si512(x, _mm512_set1_epi64(-1));
    return _mm512_cvtepi64_epi32(_mm512_lzcnt_epi64(inverted));
}

inline float noise(uint64_t key, int token) {
    const uint64_t bits = mix(key + uint64_t(token) * GOLDEN);
    return float(-std::log(-std::log((double(int64_t(bits >> 11)) + 0.5) * 0x1p-53)));
}

struct Candidate {
    float sum;
    int token;

    // The order of argmax: NaN is above all numbers, and the first of equal values wins.
    bool below(const Candidate& o) const {
        if (std::isnan(sum) || std::isnan(o.sum))
            return std::isnan(o.sum) && (!std::isnan(sum) || o.token < token);
        return sum < o.sum || (sum == o.sum && o.token < token);
    }
};

// The highest of `n` scores.
inline Candidate argmax(const float* scores, int n) {
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 highest = lowest;
    __mmask16 nans = 0;
    for (int i = 0; i < n; i += LANES) {
        const __m512 s = _mm512_mask_loadu_ps(lowest, first_lanes(n - i), scores + i);
        nans |= _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q);
        highest = _mm512_max_ps(s, highest);
    }
    const __m512 wanted = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
    for (int i = 0; i < n; i += LANES) {
        const __m512 s = _mm512_mask_loadu_ps(lowest, first_lanes(n - i), scores + i);
        const __mmask16 matches = nans ? _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q)
                                       : _mm512_cmp_ps_mask(s, wanted, _CMP_EQ_OQ);
        if (matches) return {scores[i + __builtin_ctz(matches)], i + __builtin_ctz(matches)};
    }
    return {scores[0], 0};
}

// The highest sum of score and noise of `n` tokens.
inline Candidate noisy_argmax(const float* scores, int n, uint64_t key) {
    // above log 2 by more than the rounding errors of both sides
    const __m512 log2 = _mm512_set1_ps(0.6932f);
    const __m512i step = _mm512_set1_epi64(GOLDEN * LANES);
    const __m512i indices = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    __m512i low = _mm512_mullo_epi64(indices, _mm512_set1_epi64(GOLDEN));
    low = _mm512_add_epi64(low, _mm512_set1_epi64(key));
    __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(GOLDEN * 8));
    Candidate best = argmax(scores, n);
    if (std::isnan(best.sum)) return best;
    best.sum += noise(key, best.token);
    for (int i = 0; i < n; i += LANES,
             low = _mm512_add_epi64(low, step), high = _mm512_add_epi64(high, step)) {
        const __m512i k = _mm512_inserti64x4(_mm512_castsi256_si512(leading_ones(low)),
                                             leading_ones(high), 1);
        const __m512i k_plus_1 = _mm512_add_epi32(k, _mm512_set1_epi32(1));
        const __m512 bound = _mm512_mul_ps(_mm512_cvtepi32_ps(k_plus_1), log2);
        const __m512 score = _mm512_maskz_loadu_ps(first_lanes(n - i), scores + i);
        const __m512 most = _mm512_add_ps(score, bound);
        // not -inf, so that tokens filtered to -inf do not reach it
        const float least = std::max(best.sum, std::numeric_limits<float>::lowest());
        unsigned reach = _mm512_cmp_ps_mask(most, _mm512_set1_ps(least), _CMP_GE_OQ);
        // with 53 leading ones u is rounded to 1, and the noise has no bound
        reach |= _mm512_cmpge_epi32_mask(k, _mm512_set1_epi32(53));
        for (reach &= first_lanes(n - i); reach; reach &= reach - 1) {
            const int token = i + __builtin_ctz(reach);
            const Candidate other{scores[token] + noise(key, token), token};
            if (best.below(other)) best = other;
        }
    }
    return best;
}

struct Arguments {
    const float* scores;  // (rows, width, vocabulary)
    const int64_t* seeds;
    const bool* seeded;
    const int64_t* positions;
    int64_t* tokens;
    int rows, width, vocabulary;
};

// A task is one piece of the vocabulary at one position of one row. The best of the pieces wins.
inline void draw(const Arguments& a, int threads) {
    const int pieces = (a.vocabulary + PIECE - 1) / PIECE;
    const int lines = a.rows * a.width;
    std::vector<Candidate> found(size_t(lines) * pieces);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int i = 0; i < lines * pieces; i++) {
        const int line = i / pieces, row = line / a.width, first = i % pieces * PIECE;
        const float* scores = a.scores + int64_t(line) * a.vocabulary + first;
        const int n = std::min(PIECE, a.vocabulary - first);
        const uint64_t row_key = mix(uint64_t(a.seeds[row]) * GOLDEN + 1);
        const uint64_t key = mix(row_key + uint64_t(a.positions[line]) * GOLDEN);
        found[i] = a.seeded[row] ? noisy_argmax(scores, n, key + uint64_t(first) * GOLDEN)
                                 : argmax(scores, n);
        found[i].token += first;
    }
    for (int line = 0; line < lines; line++) {
        Candidate best = found[size_t(line) * pieces];
        for (int i = 1; i < pieces; i++)
            if (best.below(found[size_t(line) * pieces + i]))
                best = found[size_t(line) * pieces + i];
        a.tokens[line] = best.token;
    }
}

}  // namespace cpu

extern "C" void draw_float(const float* scores, const int64_t* seeds, const bool* seeded,
                           const int64_t* positions, int64_t* tokens, int rows, int width,
                           int vocabulary, int threads) {
    cpu::draw({scores, seeds, seeded, positions, tokens, rows, width, vocabulary}, threads);
}

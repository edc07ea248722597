// AdamW (arXiv 1711.05101) over a flat tensor, one pass: gradient and clip scale in, float32 master and
// moments updated, rounded weights out. Plain C interface, no torch headers: it compiles in a second.
//
// The order of operations, and which of them are fused, is that of torch's CPU AdamW: the results are equal
// bit for bit, apart from the last few elements of a tensor, which torch rounds differently.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Segment {
    int64_t offset, numel;
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step;
};

constexpr int64_t BLOCK = 4096;  // elements; 16 KiB of each tensor

inline float load(const float* values, int64_t i) { return values[i]; }

inline float load(const uint16_t* values, int64_t i) {
    const uint32_t bits = static_cast<uint32_t>(values[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline void store(float* values, int64_t i, float value) { values[i] = value; }

// To bfloat16, to the nearest and ties to even; what is not a number stays so.
inline void store(uint16_t* values, int64_t i, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    values[i] = static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}

template <typename Gradient, typename Weight>
void step_block(float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                const Gradient* __restrict gradient, Weight* __restrict weights, int64_t numel, const Segment& segment,
                float scale) {
    const double correction1 = 1.0 - std::pow(segment.beta1, static_cast<double>(segment.step));
    const double correction2 = 1.0 - std::pow(segment.beta2, static_cast<double>(segment.step));
    const float step_size = static_cast<float>(segment.lr / correction1);
    const float root = static_cast<float>(std::sqrt(correction2));
    const float keep = static_cast<float>(1.0 - segment.lr * segment.weight_decay);
    const float beta2 = static_cast<float>(segment.beta2);
    const float weight1 = static_cast<float>(1.0 - segment.beta1);
    const float weight2 = static_cast<float>(1.0 - segment.beta2);
    const float eps = static_cast<float>(segment.eps);
    const bool from_average = weight1 < 0.5f;  // as torch's lerp
    const float coefficient = from_average ? weight1 : weight1 - 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < numel; ++i) {
        const float g = load(gradient, i) * scale;
        const float m = exp_avg[i];
        const float average = std::fma(coefficient, g - m, from_average ? m : g);
        const float square = std::fma(weight2 * g, g, exp_avg_sq[i] * beta2);
        const float denominator = std::sqrt(square) / root + eps;
        const float updated = master[i] * keep - step_size * average / denominator;
        exp_avg[i] = average;
        exp_avg_sq[i] = square;
        master[i] = updated;
        store(weights, i, updated);
    }
}

template <typename Gradient, typename Weight>
void step_all(float* master, float* exp_avg, float* exp_avg_sq, const Gradient* gradient, Weight* weights,
              const Segment* segments, int64_t num_segments, float scale, int threads) {
    int64_t num_blocks = 0;
    for (int64_t s = 0; s < num_segments; ++s) num_blocks += (segments[s].numel + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < num_blocks; ++block) {
        int64_t s = 0, within = block;
        for (int64_t blocks; within >= (blocks = (segments[s].numel + BLOCK - 1) / BLOCK); ++s) within -= blocks;
        const int64_t start = within * BLOCK;
        const int64_t at = segments[s].offset + start;
        const int64_t numel = segments[s].numel - start < BLOCK ? segments[s].numel - start : BLOCK;
        step_block(master + at, exp_avg + at, exp_avg_sq + at, gradient + at, weights + at, numel, segments[s], scale);
    }
}

}  // namespace

extern "C" void adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient, int gradient_is_bf16,
                      void* weights, int weights_are_bf16, const Segment* segments, int64_t num_segments, float scale,
                      int threads) {
    const auto* g16 = static_cast<const uint16_t*>(gradient);
    const auto* g32 = static_cast<const float*>(gradient);
    auto* w16 = static_cast<uint16_t*>(weights);
    auto* w32 = static_cast<float*>(weights);
    if (gradient_is_bf16 && weights_are_bf16)
        step_all(master, exp_avg, exp_avg_sq, g16, w16, segments, num_segments, scale, threads);
    else if (gradient_is_bf16)
        step_all(master, exp_avg, exp_avg_sq, g16, w32, segments, num_segments, scale, threads);
    else if (weights_are_bf16)
        step_all(master, exp_avg, exp_avg_sq, g32, w16, segments, num_segments, scale, threads);
    else
        step_all(master, exp_avg, exp_avg_sq, g32, w32, segments, num_segments, scale, threads);
}

// Sampling of one row, against the same steps with a sort and double precision.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"

namespace octavo {
namespace test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Options {
  float temperature = 1.0f;
  int top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
  int num_logprobs = -1;
};

struct Penalty {
  std::vector<int32_t> tokens, counts;
  float presence = 0.0f, frequency = 0.0f, repetition = 1.0f;
  std::vector<int32_t> banned, allowed;  // allowed: empty means no mask
  std::vector<int32_t> bias_tokens;
  std::vector<float> bias;
};

struct Sampled {
  int token_id;
  float logprob;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
};

Sampled sample(const Kernels& kernels, std::vector<float> logits, const Options& options, double random,
               const Penalty* penalty = nullptr) {
  const int size = static_cast<int>(logits.size()), top_width = 6;
  Sampled out{-2, 0.0f, std::vector<int32_t>(top_width), std::vector<float>(top_width)};
  const int32_t penalty_row = 0;
  std::vector<int32_t> start = {0, 0}, banned_rows, bias_rows;
  std::vector<uint32_t> mask;
  SampleCall call{};
  call.logits = logits.data();
  call.logits_stride = size;
  call.vocab_size = size;
  call.temperature = &options.temperature;
  call.top_k = &options.top_k;
  call.top_p = &options.top_p;
  call.min_p = &options.min_p;
  call.num_logprobs = &options.num_logprobs;
  call.random = &random;
  if (penalty != nullptr) {
    start[1] = static_cast<int32_t>(penalty->tokens.size());
    banned_rows.assign(penalty->banned.size(), 0);
    call.num_penalty_rows = 1;
    call.penalty_rows = &penalty_row;
    call.penalty_start = start.data();
    call.penalty_tokens = penalty->tokens.data();
    call.penalty_counts = penalty->counts.data();
    call.presence = &penalty->presence;
    call.frequency = &penalty->frequency;
    call.repetition = &penalty->repetition;
    call.num_banned = static_cast<int>(penalty->banned.size());
    call.banned_rows = banned_rows.data();
    call.banned_tokens = penalty->banned.data();
    mask.assign((size + 31) / 32, 0);
    for (int32_t token : penalty->allowed) mask[token / 32] |= 1u << (token % 32);
    call.num_allowed = penalty->allowed.empty() ? 0 : 1;
    call.allowed_rows = &penalty_row;
    call.allowed = mask.data();
    bias_rows.assign(penalty->bias.size(), 0);
    call.num_bias = static_cast<int>(penalty->bias.size());
    call.bias_rows = bias_rows.data();
    call.bias_tokens = penalty->bias_tokens.data();
    call.bias = penalty->bias.data();
  }
  call.token_ids = &out.token_id;
  call.logprobs = &out.logprob;
  call.top_ids = out.top_ids.data();
  call.top_logprobs = out.top_logprobs.data();
  call.top_width = top_width;
  std::vector<uint64_t> scratch(sample_scratch_bytes(size) / 8 + 1);
  kernels.sample_row(call, 0, scratch.data());
  return out;
}

// Whether `token` may be drawn: its stretch of the running sum holds `random`, but for rounding.
bool may_draw(const std::vector<float>& logits, const Options& options, double random, int token) {
  const int size = static_cast<int>(logits.size());
  std::vector<double> weights(size);
  double largest = -kInfinity;
  for (float value : logits) largest = std::max(largest, static_cast<double>(value));
  for (int i = 0; i < size; ++i) weights[i] = std::exp((logits[i] - largest) / options.temperature);
  std::vector<int> order(size);
  for (int i = 0; i < size; ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  int num_kept = options.top_k > 0 ? std::min(options.top_k, size) : size;
  double total = 0.0;
  for (int i = 0; i < num_kept; ++i) total += weights[order[i]];
  if (options.top_p < 1.0f) {
    double sum = 0.0;
    int i = 0;
    while (i < num_kept && sum < options.top_p * total) sum += weights[order[i++]];
    num_kept = i;
  }
  while (num_kept > 1 && weights[order[num_kept - 1]] < options.min_p) --num_kept;
  std::vector<bool> is_kept(size, false);
  double kept_total = 0.0;
  for (int i = 0; i < num_kept; ++i) {
    is_kept[order[i]] = true;
    kept_total += weights[order[i]];
  }
  if (token < 0 || token >= size || !is_kept[token]) return false;
  double before = 0.0;
  for (int i = 0; i < token; ++i) before += is_kept[i] ? weights[i] : 0.0;
  const double slack = 1e-5;
  return before / kept_total <= random + slack && random <= (before + weights[token]) / kept_total + slack;
}

void check_logprobs(const Kernels& kernels, const std::vector<float>& raw, const Sampled& got, int num_logprobs) {
  const int size = static_cast<int>(raw.size());
  double largest = -kInfinity, total = 0.0;
  for (float value : raw) largest = std::max(largest, static_cast<double>(value));
  for (float value : raw) total += std::exp(value - largest);
  const auto expected = [&](int id) { return raw[id] - largest - std::log(total); };
  std::vector<int> order(size);
  for (int i = 0; i < size; ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return raw[a] != raw[b] ? raw[a] > raw[b] : a < b; });
  bool is_right = is_close(got.logprob, expected(got.token_id), 1e-5);
  for (int i = 0; i < static_cast<int>(got.top_ids.size()); ++i) {
    if (i < num_logprobs && i < size) {
      is_right = is_right && got.top_ids[i] == order[i] && is_close(got.top_logprobs[i], expected(order[i]), 1e-5);
    } else {
      is_right = is_right && got.top_ids[i] == -1 && got.top_logprobs[i] == 0.0f;
    }
  }
  check(is_right, "%s sample: log-probabilities of %d tokens, %d wanted", kernels.name, size, num_logprobs);
}

void test_edges(const Kernels& kernels) {
  Options greedy;
  greedy.temperature = 0.0f;
  std::vector<float> logits(37, -1.0f);
  logits[20] = logits[30] = 2.0f;
  check(sample(kernels, logits, greedy, 0.5).token_id == 20, "%s sample: of equal logits the lower id", kernels.name);
  check(sample(kernels, {-3.0f}, Options(), 0.9).token_id == 0, "%s sample: a vocabulary of one", kernels.name);
  for (int at : {0, 8, 36}) {
    std::vector<float> broken = logits;
    broken[at] = kNan;
    check(sample(kernels, broken, greedy, 0.5).token_id == -1 && sample(kernels, broken, Options(), 0.5).token_id == -1,
          "%s sample: a NaN at %d gives no token", kernels.name, at);
  }
  check(sample(kernels, std::vector<float>(20, -kInfinity), greedy, 0.5).token_id == -1,
        "%s sample: nothing to choose from", kernels.name);
  std::vector<float> one_left(50, -kInfinity);
  one_left[33] = -5.0f;
  check(sample(kernels, one_left, Options(), 0.999).token_id == 33, "%s sample: all but one ruled out", kernels.name);
  std::vector<float> huge(50, -3e38f);
  huge[7] = 3e38f;
  check(sample(kernels, huge, Options(), 0.999).token_id == 7, "%s sample: the largest of floats", kernels.name);

  Penalty penalty;
  penalty.tokens = {20, 30, 1};
  penalty.counts = {2, 0, 1};
  penalty.repetition = 2.0f;
  penalty.frequency = 0.25f;
  penalty.presence = 0.25f;
  logits[5] = 0.9f;
  // 20: 2 / 2 - 2 * 0.25 - 0.25 = 0.25; 30, of the prompt only: 2 / 2 = 1; 5 is not penalized; 1: -1 * 2 - 0.5
  check(sample(kernels, logits, greedy, 0.5, &penalty).token_id == 30, "%s sample: penalties", kernels.name);
  penalty.banned = {30, 5};
  check(sample(kernels, logits, greedy, 0.5, &penalty).token_id == 20, "%s sample: a banned token", kernels.name);

  // Masks: words of 32 tokens with all, some and none allowed, and the last word cut short.
  for (int size : {1, 31, 32, 33, 64, 100, 1000}) {
    std::vector<float> rising(size);
    for (int token = 0; token < size; ++token) rising[token] = static_cast<float>(token);
    for (int largest : {0, size / 3, size / 2, size - 1}) {
      Penalty masked;
      masked.allowed = {largest / 2, largest};
      const int drawn = sample(kernels, rising, Options(), 0.3, &masked).token_id;
      check(sample(kernels, rising, greedy, 0.5, &masked).token_id == largest &&
                (drawn == largest || drawn == largest / 2),
            "%s sample: a mask of %d tokens up to %d", kernels.name, size, largest);
    }
  }
  Penalty biased;
  biased.bias_tokens = {3, 36};
  biased.bias = {2.5f, 3.5f};
  check(sample(kernels, logits, greedy, 0.5, &biased).token_id == 36, "%s sample: a bias", kernels.name);
}

}  // namespace

void test_sampling(const Kernels& kernels) {
  test_edges(kernels);
  Random random(5);
  for (int size : {1, 2, 7, 16, 100, 1023, 5000, 49152}) {
    for (int round = 0; round < 4; ++round) {
      // Few distinct values in every other round: many ties.
      std::vector<float> logits = random.normals(size, 3.0f);
      if (round % 2 == 1) {
        for (float& value : logits) value = std::floor(value);
      }
      Options options;
      options.num_logprobs = round == 3 ? 6 : round;
      options.temperature = 0.0f;
      const Sampled best = sample(kernels, logits, options, 0.5);
      check(best.token_id == std::max_element(logits.begin(), logits.end()) - logits.begin(), "%s sample: greedy of %d",
            kernels.name, size);
      check_logprobs(kernels, logits, best, options.num_logprobs);

      const float temperatures[] = {1.0f, 0.7f, 1.5f}, top_ps[] = {1.0f, 0.9f, 0.3f}, min_ps[] = {0.0f, 0.05f};
      const int top_ks[] = {0, 1, 40};
      bool is_right = true;
      for (float temperature : temperatures) {
        for (int top_k : top_ks) {
          for (float top_p : top_ps) {
            options.temperature = temperature;
            options.top_k = top_k;
            options.top_p = top_p;
            options.min_p = min_ps[random.below(2)];
            const double number = random.uniform(0.0f, 0.999f);
            const int token = sample(kernels, logits, options, number).token_id;
            is_right = is_right && may_draw(logits, options, number, token);
          }
        }
      }
      check(is_right, "%s sample: draws of %d tokens, round %d", kernels.name, size, round);
    }
  }
}

}  // namespace test
}  // namespace octavo

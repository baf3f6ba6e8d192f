// One token for one row of logits; what happens in which order is said at `sample` in octavo/ops/interface.py.
// Compiled once an instruction set.
//
// No sort of the vocabulary: top-k and top-p only need the weight and id of the last token that is kept. Sums over the
// weights above a threshold, the threshold halved in between, leave a few tokens among which it is. A token's key is its
// weight's bits above its id's complement, so keys are distinct and larger means better; a quickselect finds the one.
#include "kernels.h"
#include "simd.h"

#include <cmath>

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kMaxKeys = 512;  // to look among for the last kept one
constexpr int kChunk = 512;  // summed in float32; chunks are summed in float64

inline vfloat load_or(const float* p, int i, int size, float beyond) {
  if (i + kLanes <= size) return load(p + i);
  return select(less(iota(), set1(static_cast<float>(size - i))), load_first(p + i, size - i), set1(beyond));
}

// The largest value, or a NaN if there is one or if there is a +inf.
float largest_of(const float* x, int size) {
  vfloat best = set1(kMinusInfinity);
  uint32_t nan_lanes = 0;
  for (int i = 0; i < size; i += kLanes) {
    const vfloat v = load_or(x, i, size, kMinusInfinity);
    nan_lanes |= lanes_of(is_nan(v));
    best = max(v, best);
  }
  const float largest = max_lane(best);
  return nan_lanes != 0 || largest == -kMinusInfinity ? __builtin_nanf("") : largest;
}

int first_equal(const float* x, int size, float value) {
  const vfloat wanted = set1(value);
  for (int i = 0; i < size; i += kLanes) {
    const vfloat v = load_or(x, i, size, kMinusInfinity);
    const uint32_t smaller = lanes_of(less(v, wanted));
    const uint32_t all = (1u << kLanes) - 1;
    if (smaller != all) return i + __builtin_ctz(~smaller & all);
  }
  return -1;
}

// e^(y) that truly ends at 0
inline vfloat weight_of(vfloat y) { return select(less(y, set1(-87.0f)), zero(), exp(y)); }

double sum_of_weights(const float* x, int size, float largest) {
  const vfloat minus = set1(largest);
  double total = 0.0;
  for (int begin = 0; begin < size; begin += kChunk) {
    vfloat sum = zero();
    const int end = min_int(begin + kChunk, size);
    for (int i = begin; i < end; i += kLanes) {
      sum = add(sum, weight_of(sub(load_or(x, i, end, kMinusInfinity), minus)));
    }
    total += static_cast<double>(sum_lanes(sum));
  }
  return total;
}

// The `count` largest of a row, best first, ties by lower id.
void find_best(const float* x, int size, int count, int32_t* ids, float* values) {
  int num_found = 0;
  float worst = kMinusInfinity;
  for (int i = 0; i < size; i += kLanes) {
    const vfloat v = load_or(x, i, size, kMinusInfinity);
    uint32_t candidates = num_found < count ? (1u << min_int(kLanes, size - i)) - 1 : lanes_of(less(set1(worst), v));
    for (; candidates != 0; candidates &= candidates - 1) {
      const int id = i + __builtin_ctz(candidates);
      const float value = x[id];
      if (num_found == count && !(value > worst)) continue;
      int at = num_found < count ? num_found++ : count - 1;
      for (; at > 0 && values[at - 1] < value; --at) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
      }
      values[at] = value;
      ids[at] = id;
      worst = values[num_found - 1];
    }
  }
}

// mask: [ceil(size / 32)]
void apply_mask(const uint32_t* mask, float* x, int size) {
  for (int begin = 0; begin < size; begin += 32) {
    uint32_t excluded = ~mask[begin / 32];
    if (size - begin < 32) excluded &= (1u << (size - begin)) - 1;
    if (excluded == ~0u) {
      const vfloat minus_infinity = set1(kMinusInfinity);
      for (int i = begin; i < begin + 32; i += kLanes) store(x + i, minus_infinity);
      continue;
    }
    for (; excluded != 0; excluded &= excluded - 1) x[begin + __builtin_ctz(excluded)] = kMinusInfinity;
  }
}

// Returns whether any was the row's.
bool apply_settings(const SampleCall& call, int row, float* x) {
  bool is_any = false;
  for (int i = 0; i < call.num_banned; ++i) {
    if (call.banned_rows[i] != row) continue;
    x[call.banned_tokens[i]] = kMinusInfinity;
    is_any = true;
  }
  const ptrdiff_t num_words = (call.vocab_size + 31) / 32;
  for (int i = 0; i < call.num_allowed; ++i) {
    if (call.allowed_rows[i] != row) continue;
    apply_mask(call.allowed + i * num_words, x, call.vocab_size);
    is_any = true;
  }
  for (int p = 0; p < call.num_penalty_rows; ++p) {
    if (call.penalty_rows[p] != row) continue;
    is_any = true;
    for (int i = call.penalty_start[p]; i < call.penalty_start[p + 1]; ++i) {
      float& value = x[call.penalty_tokens[i]];
      const float count = static_cast<float>(call.penalty_counts[i]);
      value = value > 0 ? value / call.repetition[p] : value * call.repetition[p];
      value = value - call.frequency[p] * count - (call.penalty_counts[i] > 0 ? call.presence[p] : 0.0f);
    }
  }
  for (int i = 0; i < call.num_bias; ++i) {
    if (call.bias_rows[i] != row) continue;
    x[call.bias_tokens[i]] += call.bias[i];
    is_any = true;
  }
  return is_any;
}

inline uint64_t key_of(float weight, int id) {
  return static_cast<uint64_t>(bits_of(weight)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
inline float weight_in(uint64_t key) { return float_of(static_cast<uint32_t>(key >> 32)); }

// The number of weights of at least `threshold`, and their sum.
struct Above {
  int count;
  double sum;
};

Above measure_above(const float* weights, int size, float threshold) {
  const vfloat limit = set1(threshold), one = set1(1.0f);
  Above above{0, 0.0};
  for (int begin = 0; begin < size; begin += kChunk) {
    vfloat sum = zero(), count = zero();
    const int end = min_int(begin + kChunk, size);
    for (int i = begin; i < end; i += kLanes) {
      const vfloat weight = load_or(weights, i, end, 0.0f);
      const vmask is_below = less(weight, limit);
      sum = add(sum, select(is_below, zero(), weight));
      count = add(count, select(is_below, zero(), one));
    }
    above.count += static_cast<int>(sum_lanes(count));
    above.sum += static_cast<double>(sum_lanes(sum));
  }
  return above;
}

// Keys of the weights in [low, high), in order of id.
int gather_keys(const float* weights, int size, float low, float high, uint64_t* keys) {
  const vfloat from = set1(low), to = set1(high);
  int count = 0;
  for (int i = 0; i < size; i += kLanes) {
    const vfloat weight = load_or(weights, i, size, 0.0f);
    uint32_t kept = ~lanes_of(less(weight, from)) & lanes_of(less(weight, to));
    for (; kept != 0; kept &= kept - 1) {
      const int id = i + __builtin_ctz(kept);
      keys[count++] = key_of(weights[id], id);
    }
  }
  return count;
}

// Reorders keys so that the larger ones come first, as far as needed to find the fewest of them, best first, whose
// weights reach `needed` (or whose number does, if is_count). Returns their number; all if they do not reach it.
int select_keys(uint64_t* keys, int count, double needed, bool is_count) {
  int begin = 0, end = count;  // the last one kept lies in [begin, end)
  double before = 0.0;         // what the keys before `begin` bring
  while (end - begin > 1) {
    const uint64_t a = keys[begin], b = keys[begin + (end - begin) / 2], c = keys[end - 1];
    const uint64_t pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
    int split = begin;  // [begin, split): keys >= pivot
    double larger = 0.0;
    int pivot_at = begin;
    for (int i = begin; i < end; ++i) {
      if (keys[i] < pivot) continue;
      const uint64_t key = keys[i];
      keys[i] = keys[split];
      keys[split] = key;
      if (key == pivot) {
        pivot_at = split;
      } else {
        larger += is_count ? 1.0 : static_cast<double>(weight_in(key));
      }
      ++split;
    }
    keys[pivot_at] = keys[split - 1];  // the pivot goes last of the larger ones
    keys[split - 1] = pivot;
    const double with_pivot = before + larger + (is_count ? 1.0 : static_cast<double>(weight_in(pivot)));
    if (split - 1 > begin && before + larger >= needed) {
      end = split - 1;
    } else if (with_pivot >= needed) {
      return split;
    } else if (split == end) {
      return end;
    } else {
      before = with_pivot;
      begin = split;
    }
  }
  return end;
}

// Keeps the fewest weights, best first, whose number (is_count) or sum reaches `needed`, and sets the others to 0. All
// weights are in [0, 1].
void keep_best(float* weights, int size, double needed, bool is_count, uint64_t* keys) {
  const auto reach = [&](const Above& above) { return is_count ? static_cast<double>(above.count) : above.sum; };
  // Thresholds by their bits, which are ordered as the floats are. Those from `low` on reach, those from `high` do not.
  uint32_t low = 1, high = bits_of(1.0f) + 1;
  Above above_low{size, 0.0}, above_high{0, 0.0};  // of low: at most so many, to begin with
  // The last one kept mostly lies above a thousandth of the best, nearly always above the second guess.
  uint32_t middle = bits_of(1e-3f);
  while (above_low.count - above_high.count > kMaxKeys && high - low > 1) {
    const Above above = measure_above(weights, size, float_of(middle));
    if (reach(above) >= needed) {
      low = middle;
      above_low = above;
    } else {
      high = middle;
      above_high = above;
    }
    const uint32_t second_guess = bits_of(1.5e-8f);
    middle = low == 1 && high > second_guess ? second_guess : low + (high - low) / 2;
  }
  if (low == 1 && reach(measure_above(weights, size, float_of(low))) < needed) return;
  int count = gather_keys(weights, size, float_of(low), float_of(high), keys);
  count = select_keys(keys, count, needed - reach(above_high), is_count);
  uint64_t last = ~uint64_t{0};
  for (int i = 0; i < count; ++i) last = keys[i] < last ? keys[i] : last;
  const float last_weight = weight_in(last);
  const int last_id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(last));
  const vfloat limit = set1(last_weight);
  for (int i = 0; i < size; i += kLanes) {
    if (i + kLanes <= size && !(i <= last_id && last_id < i + kLanes)) {
      // Of equal weights, those of lower ids are kept.
      const vfloat v = load(weights + i);
      store(weights + i, i < last_id ? select(less(v, limit), zero(), v) : select(less(limit, v), v, zero()));
    } else {
      for (int id = i; id < min_int(i + kLanes, size); ++id) {
        if (key_of(weights[id], id) < last) weights[id] = 0.0f;
      }
    }
  }
}

// The first id at which the running sum exceeds random * total.
int draw(const float* weights, int size, double random, double* chunk_sums) {
  double total = 0.0;
  int num_chunks = 0;
  for (int begin = 0; begin < size; begin += kChunk) {
    vfloat sum = zero();
    const int end = min_int(begin + kChunk, size);
    for (int i = begin; i < end; i += kLanes) sum = add(sum, load_or(weights, i, end, 0.0f));
    chunk_sums[num_chunks] = static_cast<double>(sum_lanes(sum));
    total += chunk_sums[num_chunks++];
  }
  const double target = random * total;
  double running = 0.0;
  int last_kept = -1;
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    if (running + chunk_sums[chunk] <= target) {
      running += chunk_sums[chunk];
      continue;
    }
    double inside = running;
    for (int id = chunk * kChunk; id < min_int((chunk + 1) * kChunk, size); ++id) {
      if (weights[id] <= 0.0f) continue;
      last_kept = id;
      inside += static_cast<double>(weights[id]);
      if (inside > target) return id;
    }
    running += chunk_sums[chunk];  // float32 and float64 sums disagree by less than a weight: take the next chunk
  }
  if (last_kept >= 0) return last_kept;
  for (int id = size - 1; id >= 0; --id) {
    if (weights[id] > 0.0f) return id;
  }
  return -1;
}

}  // namespace

void sample_row(const SampleCall& call, int row, void* scratch) {
  float* x = call.logits + row * call.logits_stride;
  const int size = call.vocab_size;
  uint64_t* keys = static_cast<uint64_t*>(scratch);                                  // [vocab_size]
  float* raw = reinterpret_cast<float*>(keys + size);                                // [vocab_size]
  const int num_logprobs = call.num_logprobs[row];
  int32_t* top_ids = call.top_ids + static_cast<ptrdiff_t>(row) * call.top_width;
  float* top_logprobs = call.top_logprobs + static_cast<ptrdiff_t>(row) * call.top_width;
  call.token_ids[row] = -1;
  call.logprobs[row] = 0.0f;
  for (int i = 0; i < call.top_width; ++i) {
    top_ids[i] = -1;
    top_logprobs[i] = 0.0f;
  }

  const float raw_largest = largest_of(x, size);
  if (!(raw_largest > kMinusInfinity)) return;  // NaN, +inf, or nothing to choose from
  const bool is_wanted = num_logprobs >= 0;
  if (is_wanted) __builtin_memcpy(raw, x, static_cast<size_t>(size) * 4);

  const float largest = apply_settings(call, row, x) ? largest_of(x, size) : raw_largest;
  if (!(largest > kMinusInfinity)) return;

  int token_id;
  const float temperature = call.temperature[row];
  if (temperature == 0.0f) {
    token_id = first_equal(x, size, largest);
  } else {
    // Times the inverse: a division takes as long as all the rest. The limit keeps 0 times it 0.
    const vfloat minus = set1(largest), inverse = set1(1.0f / temperature < 3e38f ? 1.0f / temperature : 3e38f);
    const vfloat min_p = set1(call.min_p[row]);
    const int top_k = call.top_k[row];
    const float top_p = call.top_p[row];
    double total = 0.0;
    for (int begin = 0; begin < size; begin += kChunk) {
      vfloat sum = zero();
      const int end = min_int(begin + kChunk, size);
      for (int i = begin; i < end; i += kLanes) {
        const vfloat weight = weight_of(mul(sub(load_or(x, i, end, kMinusInfinity), minus), inverse));
        if (i + kLanes <= end) {
          store(x + i, weight);
        } else {
          store_first(x + i, weight, end - i);
        }
        sum = add(sum, weight);
      }
      total += static_cast<double>(sum_lanes(sum));
    }
    const bool has_top_k = top_k > 0 && top_k < size;
    if (has_top_k) keep_best(x, size, top_k, true, keys);
    if (top_p < 1.0f) {
      if (has_top_k) total = measure_above(x, size, 0.0f).sum;
      keep_best(x, size, static_cast<double>(top_p) * total, false, keys);
    }
    if (call.min_p[row] > 0.0f) {
      int i = 0;
      for (; i + kLanes <= size; i += kLanes) {
        const vfloat weight = load(x + i);
        store(x + i, select(less(weight, min_p), zero(), weight));
      }
      for (; i < size; ++i) x[i] = x[i] < call.min_p[row] ? 0.0f : x[i];
    }
    token_id = draw(x, size, call.random[row], reinterpret_cast<double*>(keys));
  }
  call.token_ids[row] = token_id;
  if (!is_wanted || token_id < 0) return;
  const double log_total = std::log(sum_of_weights(raw, size, raw_largest));
  const auto logprob = [&](float value) {
    return static_cast<float>(static_cast<double>(value) - static_cast<double>(raw_largest) - log_total);
  };
  call.logprobs[row] = logprob(raw[token_id]);
  const int count = min_int(min_int(num_logprobs, call.top_width), size);
  if (count <= 0) return;
  find_best(raw, size, count, top_ids, top_logprobs);
  for (int i = 0; i < count; ++i) top_logprobs[i] = logprob(top_logprobs[i]);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

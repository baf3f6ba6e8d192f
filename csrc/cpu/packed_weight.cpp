#include "packed_weight.h"

#include <cstring>

#include <sys/mman.h>

namespace octavo {
namespace {

// Row r of the sources laid one after the other.
struct RowRef {
  const WeightSource* source;
  int row;
};

RowRef find_row(const std::vector<WeightSource>& sources, int row) {
  for (const WeightSource& source : sources) {
    if (row < source.num_rows) return {&source, row};
    row -= source.num_rows;
  }
  return {nullptr, 0};
}

bool is_exact_half(const float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (bits_of(to_float(to_half(values[i]))) != bits_of(values[i])) return false;
  }
  return true;
}

size_t item_size(WeightKind kind) { return kind == WeightKind::float32 ? 4 : 2; }

float element(const RowRef& ref, int column, int num_columns) {
  const size_t index = static_cast<size_t>(ref.row) * num_columns + column;
  const size_t group = static_cast<size_t>(ref.row) * (num_columns / kGroupSize) + column / kGroupSize;
  const WeightSource& source = *ref.source;
  switch (source.kind) {
    case WeightKind::float32:
      return static_cast<const float*>(source.values)[index];
    case WeightKind::float16:
      return to_float(static_cast<const half*>(source.values)[index]);
    case WeightKind::bfloat16:
      return to_float(static_cast<const bfloat*>(source.values)[index]);
    case WeightKind::q4:
    case WeightKind::q8: {
      const int code = source.kind == WeightKind::q4 ? static_cast<const uint8_t*>(source.values)[index]
                                                     : static_cast<const int8_t*>(source.values)[index];
      const float scaled = static_cast<float>(code) * source.scale[group];
      return source.minimum == nullptr ? scaled : scaled + source.minimum[group];
    }
  }
  return 0.0f;
}

// Codes of one panel; refs has 16 rows, those beyond N with no source.
void pack_codes(WeightKind kind, const RowRef* refs, int num_columns, uint8_t* out, int16_t* code_sum) {
  const int num_groups = num_columns / kGroupSize;
  const int group_bytes = kind == WeightKind::q4 ? kPanelWidth * kGroupSize / 2 : kPanelWidth * kGroupSize;
  for (int channel = 0; channel < kPanelWidth; ++channel) {
    if (refs[channel].source == nullptr) continue;
    const uint8_t* codes =
        static_cast<const uint8_t*>(refs[channel].source->values) + static_cast<size_t>(refs[channel].row) * num_columns;
    for (int group = 0; group < num_groups; ++group) {
      const uint8_t* in = codes + group * kGroupSize;
      uint8_t* panel = out + static_cast<size_t>(group) * group_bytes + channel * 4;
      int sum = 0;
      for (int i = 0; i < kGroupSize; ++i) sum += kind == WeightKind::q4 ? in[i] & 15 : static_cast<int8_t>(in[i]);
      code_sum[group * kPanelWidth + channel] = static_cast<int16_t>(sum);
      uint32_t quads[8];
      std::memcpy(quads, in, kGroupSize);
      if (kind == WeightKind::q4) {
        for (int j = 0; j < 4; ++j) {
          const uint32_t packed = (quads[j] & 0x0f0f0f0f) | (quads[j + 4] & 0x0f0f0f0f) << 4;
          std::memcpy(panel + j * 64, &packed, 4);
        }
      } else {
        for (int j = 0; j < 8; ++j) {
          const uint32_t shifted = quads[j] ^ 0x80808080;
          std::memcpy(panel + j * 64, &shifted, 4);
        }
      }
    }
  }
}

void pack_group_floats(const RowRef* refs, int num_groups, bool is_minimum, bool as_half, void* out) {
  for (int channel = 0; channel < kPanelWidth; ++channel) {
    if (refs[channel].source == nullptr) continue;
    const float* from = is_minimum ? refs[channel].source->minimum : refs[channel].source->scale;
    if (from == nullptr) continue;
    from += static_cast<size_t>(refs[channel].row) * num_groups;
    for (int group = 0; group < num_groups; ++group) {
      const size_t index = static_cast<size_t>(group) * kPanelWidth + channel;
      if (as_half) {
        static_cast<half*>(out)[index] = to_half(from[group]);
      } else {
        static_cast<float*>(out)[index] = from[group];
      }
    }
  }
}

void pack_values(WeightKind kind, const RowRef* refs, int num_columns, void* out) {
  for (int channel = 0; channel < kPanelWidth; ++channel) {
    const RowRef ref = refs[channel];
    if (ref.source == nullptr) continue;
    for (int column = 0; column < num_columns; ++column) {
      const size_t index = static_cast<size_t>(column) * kPanelWidth + channel;
      if (ref.source->kind == kind && kind != WeightKind::float32) {
        const size_t from = static_cast<size_t>(ref.row) * num_columns + column;
        static_cast<uint16_t*>(out)[index] = static_cast<const uint16_t*>(ref.source->values)[from];
        continue;
      }
      const float x = element(ref, column, num_columns);
      if (kind == WeightKind::float32) {
        static_cast<float*>(out)[index] = x;
      } else if (kind == WeightKind::float16) {
        static_cast<half*>(out)[index] = to_half(x);
      } else {
        static_cast<bfloat*>(out)[index] = to_bfloat(x);
      }
    }
  }
}

struct PackJob {
  const std::vector<WeightSource>* sources;
  PackedMatrix* out;
  int panels_per_task;
};

void pack_panels(void* context, int task, int) {
  const PackJob& job = *static_cast<PackJob*>(context);
  PackedMatrix& matrix = *job.out;
  const int first = task * job.panels_per_task;
  for (int panel = first; panel < first + job.panels_per_task && panel < matrix.num_panels; ++panel) {
    RowRef refs[kPanelWidth];
    for (int channel = 0; channel < kPanelWidth; ++channel) {
      refs[channel] = find_row(*job.sources, panel * kPanelWidth + channel);
    }
    const size_t at = static_cast<size_t>(panel) * kPanelWidth;
    if (matrix.kind == WeightKind::q4 || matrix.kind == WeightKind::q8) {
      const size_t panel_bytes = matrix.values.size() / matrix.num_panels;
      pack_codes(matrix.kind, refs, matrix.num_columns, matrix.values.as<uint8_t>() + panel * panel_bytes,
                 matrix.code_sum.as<int16_t>() + at * matrix.num_groups());
      const size_t float_offset = at * matrix.num_groups() * (matrix.has_half_scales ? 2 : 4);
      pack_group_floats(refs, matrix.num_groups(), false, matrix.has_half_scales,
                        matrix.scale.as<char>() + float_offset);
      if (matrix.minimum.size() > 0) {
        pack_group_floats(refs, matrix.num_groups(), true, matrix.has_half_scales,
                          matrix.minimum.as<char>() + float_offset);
      }
    } else {
      pack_values(matrix.kind, refs, matrix.num_columns,
                  matrix.values.as<char>() + at * matrix.num_columns * item_size(matrix.kind));
    }
  }
}

// From here on a page more or less does not matter.
constexpr size_t kMinMappedBytes = 1 << 18;

bool pack(Workers& workers, const std::vector<WeightSource>& sources, int num_columns, WeightKind kind,
          PackedMatrix& out) {
  out.kind = kind;
  out.num_columns = num_columns;
  out.num_rows = 0;
  bool has_minimum = false;
  out.has_half_scales = true;
  const int num_groups = num_columns / kGroupSize;
  const bool is_quantized = kind == WeightKind::q4 || kind == WeightKind::q8;
  for (const WeightSource& source : sources) {
    out.num_rows += source.num_rows;
    if (!is_quantized) continue;
    const size_t count = static_cast<size_t>(source.num_rows) * num_groups;
    out.has_half_scales = out.has_half_scales && is_exact_half(source.scale, count);
    if (source.minimum != nullptr) {
      has_minimum = true;
      out.has_half_scales = out.has_half_scales && is_exact_half(source.minimum, count);
    }
  }
  out.num_panels = (out.num_rows + kPanelWidth - 1) / kPanelWidth;
  const size_t channels = static_cast<size_t>(out.num_panels) * kPanelWidth;
  if (is_quantized) {
    const size_t float_bytes = channels * num_groups * (out.has_half_scales ? 2 : 4);
    if (!out.values.allocate(channels * num_columns / (kind == WeightKind::q4 ? 2 : 1)) ||
        !out.scale.allocate(float_bytes) || !out.code_sum.allocate(channels * num_groups * 2) || (has_minimum && !out.minimum.allocate(float_bytes))) {
      return false;
    }
  } else if (!out.values.allocate(channels * num_columns * item_size(kind))) {
    return false;
  }
  PackJob job{&sources, &out, 8};
  const Workers::Lock lock(workers.busy);
  workers.pool.run((out.num_panels + 7) / 8, pack_panels, &job);
  return true;
}

}  // namespace

bool Buffer::allocate(size_t num_bytes) {
  size_ = (num_bytes + 63) / 64 * 64;
  is_mapped_ = size_ >= kMinMappedBytes;
  if (is_mapped_) {
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) data_ = nullptr;
  } else {
    data_ = std::aligned_alloc(64, size_ > 0 ? size_ : 64);
    if (data_ != nullptr) std::memset(data_, 0, size_);
  }
  if (data_ == nullptr) size_ = 0;
  return data_ != nullptr;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (is_mapped_) {
    munmap(data_, size_);
  } else {
    std::free(data_);
  }
}

bool pack_same_kind(Workers& workers, const std::vector<WeightSource>& sources, int num_columns, PackedMatrix& out) {
  return pack(workers, sources, num_columns, sources[0].kind, out);
}

bool pack_as_float(Workers& workers, const std::vector<WeightSource>& sources, int num_columns, WeightKind kind,
                   PackedMatrix& out) {
  return pack(workers, sources, num_columns, kind, out);
}

void read_row(const PackedMatrix& matrix, int row, float factor, float* out) {
  const size_t panel = static_cast<size_t>(row / kPanelWidth);
  const int channel = row % kPanelWidth;
  const int num_columns = matrix.num_columns;
  if (matrix.kind == WeightKind::q4 || matrix.kind == WeightKind::q8) {
    const bool is_q4 = matrix.kind == WeightKind::q4;
    const int num_groups = matrix.num_groups();
    const size_t group_bytes = is_q4 ? 256 : 512;
    const uint8_t* codes = matrix.values.as<uint8_t>() + panel * num_groups * group_bytes + channel * 4;
    for (int group = 0; group < num_groups; ++group, codes += group_bytes) {
      const size_t at = (panel * num_groups + group) * kPanelWidth + channel;
      const auto read = [&](const Buffer& from) {
        return matrix.has_half_scales ? to_float(from.as<half>()[at]) : from.as<float>()[at];
      };
      const float scale = read(matrix.scale);
      const bool has_minimum = matrix.minimum.size() > 0;
      const float minimum = has_minimum ? read(matrix.minimum) : 0.0f;
      for (int i = 0; i < kGroupSize; ++i) {
        const uint8_t byte = codes[(is_q4 ? i / 4 % 4 : i / 4) * 64 + i % 4];
        const int code = !is_q4 ? static_cast<int>(byte) - 128 : i < 16 ? byte & 15 : byte >> 4;
        const float scaled = static_cast<float>(code) * scale;
        out[group * kGroupSize + i] = (has_minimum ? scaled + minimum : scaled) * factor;
      }
    }
    return;
  }
  const size_t base = panel * num_columns * kPanelWidth + channel;
  for (int column = 0; column < num_columns; ++column) {
    const size_t at = base + static_cast<size_t>(column) * kPanelWidth;
    float x;
    if (matrix.kind == WeightKind::float32) {
      x = matrix.values.as<float>()[at];
    } else if (matrix.kind == WeightKind::float16) {
      x = to_float(matrix.values.as<half>()[at]);
    } else {
      x = to_float(matrix.values.as<bfloat>()[at]);
    }
    out[column] = x * factor;
  }
}

void spread_weight(const Weight& weight, const Placement& placement) {
  if (!placement.is_spread()) return;
  // `linear` makes tasks of the matrices one after the other, about as many as they have bytes, and deals them out to the
  // nodes in order.
  constexpr size_t kParts = 1 << 20;
  double before = 0.0;  // share of the weight that lies in the matrices before
  for (const PackedMatrix& matrix : weight.matrices) {
    const double share = static_cast<double>(matrix.num_bytes()) / static_cast<double>(weight.num_bytes());
    const auto place_in_matrix = [&](size_t part) {
      const double place = (static_cast<double>(part) / kParts - before) / share;
      return place < 0.0 ? 0.0 : place > 1.0 ? 1.0 : place;
    };
    for (size_t node = 0; node < placement.nodes.size(); ++node) {
      const double from = place_in_matrix(placement.begin_of(node, kParts));
      const double to = place_in_matrix(placement.begin_of(node + 1, kParts));
      for (const Buffer* buffer : {&matrix.values, &matrix.scale, &matrix.minimum, &matrix.code_sum}) {
        const size_t begin = static_cast<size_t>(from * static_cast<double>(buffer->size()));
        const size_t end = static_cast<size_t>(to * static_cast<double>(buffer->size()));
        if (end > begin) move_to_node(buffer->as<char>() + begin, end - begin, placement.nodes[node].id);
      }
    }
    before += share;
  }
}

}  // namespace octavo

// NumPy arrays as the binding sees them: checked once, refused with ShapeError.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <string>

namespace octavo {

namespace nb = nanobind;

extern PyObject* shape_error;  // octavo.errors.ShapeError

[[noreturn]] inline void refuse(const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  PyErr_SetString(shape_error, text);
  throw nb::python_error();
}

inline void require_memory(bool has_memory) {
  if (!has_memory) throw std::bad_alloc();
}

enum class Type { float32, float64, float16, int8, uint8, uint16, int32, int64 };

inline const char* name_of(Type type) {
  static const char* const names[] = {"float32", "float64", "float16", "int8", "uint8", "uint16", "int32", "int64"};
  return names[static_cast<int>(type)];
}

inline bool has_type(const Py_buffer& buffer, Type type) {
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  if (*format == '<' || *format == '=' || *format == '@') ++format;
  const char code = format[0];
  if (format[0] == '\0' || format[1] != '\0') return false;
  switch (type) {
    case Type::float32: return code == 'f';
    case Type::float64: return code == 'd';
    case Type::float16: return code == 'e';
    case Type::int8: return code == 'b';
    case Type::uint8: return code == 'B';
    case Type::uint16: return code == 'H';
    case Type::int32: return buffer.itemsize == 4 && (code == 'i' || code == 'l');
    case Type::int64: return buffer.itemsize == 8 && (code == 'l' || code == 'q');
  }
  return false;
}

// A NumPy array seen through the buffer protocol (a tenth of the cost of DLPack). The last `num_dense` axes must be
// contiguous.
class View {
 public:
  View(nb::handle array, const char* name, Type type, int num_axes, int num_dense, bool is_written = false) : name_(name) {
    if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0)) != 0) {
      PyErr_Clear();
      buffer_.obj = nullptr;
      refuse("%s must be %s NumPy array", name, is_written ? "a writable" : "a");
    }
    if (!has_type(buffer_, type) || buffer_.ndim != num_axes) {
      const std::string format = buffer_.format == nullptr ? "B" : buffer_.format;
      const int ndim = buffer_.ndim;
      release();
      refuse("%s must be %s with %d axes, not '%s' with %d", name, name_of(type), num_axes, format.c_str(), ndim);
    }
    Py_ssize_t expected = buffer_.itemsize;
    for (int axis = num_axes - 1; axis >= num_axes - num_dense; --axis) {
      if (buffer_.shape[axis] > 1 && buffer_.strides[axis] != expected && !is_empty()) {
        release();
        refuse("%s must be contiguous in its last %d axes", name, num_dense);
      }
      expected *= buffer_.shape[axis];
    }
    for (int axis = 0; axis < num_axes; ++axis) {
      if (buffer_.shape[axis] > 0x7fffffff || buffer_.strides[axis] % buffer_.itemsize != 0) {
        release();
        refuse("%s has an axis that is too long, or elements that are not aligned", name);
      }
    }
  }
  ~View() { release(); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  int shape(int axis) const { return static_cast<int>(buffer_.shape[axis]); }
  // Elements from one index of the axis to the next; 0 on an axis of one.
  ptrdiff_t stride(int axis) const { return buffer_.shape[axis] > 1 ? buffer_.strides[axis] / buffer_.itemsize : 0; }
  template <class T>
  T* as() const {
    return static_cast<T*>(buffer_.buf);
  }
  void expect(int axis, int size) const {
    if (shape(axis) != size) refuse("%s has %d along axis %d, expected %d", name_, shape(axis), axis, size);
  }

 private:
  bool is_empty() const {
    for (int axis = 0; axis < buffer_.ndim; ++axis) {
      if (buffer_.shape[axis] == 0) return true;
    }
    return false;
  }
  void release() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
    buffer_.obj = nullptr;
  }

  const char* name_;
  Py_buffer buffer_{};
};

// Views of an array that may be None.
struct OptionalView {
  OptionalView(nb::handle array, const char* name, Type type, int num_axes, int num_dense) {
    if (!array.is_none()) view.reset(new View(array, name, type, num_axes, num_dense));
  }
  std::unique_ptr<View> view;
};

inline void check_indices(const int32_t* indices, int count, int limit, const char* name) {
  for (int i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= limit) refuse("%s has %d, outside of [0, %d)", name, indices[i], limit);
  }
}

}  // namespace octavo

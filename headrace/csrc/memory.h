// Anonymous memory for weights, KV pages and workspace: one mapping each, in huge pages where the
// machine has them, touched once at load so that what is planned is what is resident.
#pragma once
#include <cstddef>
#include <cstdint>

#include "threads.h"

namespace hr {

constexpr size_t kPage = 4096;

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

class Arena {
 public:
  // Throws std::bad_alloc where the system refuses. Zero bytes are allowed.
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;
  uint8_t *data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Makes every page resident, each thread its share.
  void touch(Pool &pool);
  // Makes [offset, offset + bytes) resident without changing it, while others may use it. False where
  // the system cannot; then pages become resident when they are first used.
  bool populate(size_t offset, size_t bytes);

 private:
  void *mapping_ = nullptr;
  size_t mapped_ = 0;
  uint8_t *data_ = nullptr;
  size_t bytes_;
};

// Tells the system that the pages wholly inside [data, data + bytes), of a read-only file mapping, are
// not needed for now. They are read again from the file if they are touched.
void release(const uint8_t *data, size_t bytes);

}  // namespace hr

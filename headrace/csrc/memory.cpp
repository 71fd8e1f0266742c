#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace hr {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Arena::Arena(size_t bytes) : bytes_(round_up(bytes, kPage)) {
  if (bytes_ == 0) return;
  // Room to start at the border of a huge page; what is never touched takes no memory.
  bool huge = bytes_ >= kHugePage;
  mapped_ = bytes_ + (huge ? kHugePage : 0);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<uint8_t *>(huge ? round_up(address, kHugePage) : address);
  // Whole huge pages alone: the kernel must not round the tail up to one.
  if (huge) madvise(data_, bytes_ / kHugePage * kHugePage, MADV_HUGEPAGE);
}

Arena::~Arena() {
  if (mapping_) munmap(mapping_, mapped_);
}

void Arena::touch(Pool &pool) {
  int32_t pieces = static_cast<int32_t>((bytes_ + kHugePage - 1) / kHugePage);
  pool.each(pieces, [&](int32_t piece) {
    size_t begin = static_cast<size_t>(piece) * kHugePage;
    size_t end = std::min(begin + kHugePage, bytes_);
    for (size_t at = begin; at < end; at += kPage) {
      volatile uint8_t *byte = data_ + at;
      *byte = *byte;
    }
  });
}

bool Arena::populate(size_t offset, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr int advice = MADV_POPULATE_WRITE;
#else
  constexpr int advice = 23;  // Linux 5.14, older headers
#endif
  if (offset >= bytes_) return true;
  return madvise(data_ + offset, std::min(bytes, bytes_ - offset), advice) == 0;
}

void release(const uint8_t *data, size_t bytes) {
  auto begin = round_up(reinterpret_cast<uintptr_t>(data), kPage);
  auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace hr

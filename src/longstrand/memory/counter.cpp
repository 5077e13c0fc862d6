// Counts the bytes that torch's CPU allocator has given out, and the most of them at once.
//
// An allocator that stands in front of torch's own. What was allocated before it stands there is not counted, and what
// it has given out goes back through it, so that it stays for the life of the process.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

int64_t live = 0, most = 0;

// Blocks are torch's own, and only their sizes are kept here: what was given out before, or is freed past this allocator,
// does no harm. torch asks that what frees a block be given the block itself.
// Neither is ever destroyed: tensors are freed until the very end of the process.
std::mutex& guard = *new std::mutex;
std::unordered_map<void*, int64_t>& sizes = *new std::unordered_map<void*, int64_t>;

c10::Allocator* behind() {
  static c10::Allocator* const torchs = c10::GetCPUAllocator();
  return torchs;
}

void give_back(void* block) {
  {
    std::lock_guard<std::mutex> lock(guard);
    auto found = sizes.find(block);
    if (found != sizes.end()) {
      live -= found->second;
      sizes.erase(found);
    }
  }
  behind()->raw_deleter()(block);
}

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = behind()->allocate(bytes);
    const c10::Device device = memory.device();
    void* block = memory.release_context();
    if (block == nullptr) return {nullptr, nullptr, &give_back, device};
    std::lock_guard<std::mutex> lock(guard);
    int64_t& size = sizes[block];
    live += static_cast<int64_t>(bytes) - size;
    size = static_cast<int64_t>(bytes);
    if (live > most) most = live;
    return {block, block, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

// Whether it counts from now on: not where torch's allocator has no one deleter to give blocks back to, nor where another
// allocator keeps its place before this one.
bool start_counting() {
  static Counter counter;
  if (behind()->raw_deleter() == nullptr) return false;
  c10::SetCPUAllocator(&counter, 1);
  return c10::GetCPUAllocator() == &counter;
}

int64_t live_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return live;
}

int64_t take_most() {
  std::lock_guard<std::mutex> lock(guard);
  const int64_t found = most;
  most = live;
  return found;
}
}

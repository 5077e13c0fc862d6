// Counts the bytes that torch's CPU allocator has given out, and the most of them at once.
//
// An allocator that stands in front of torch's own. What was allocated before it stands there is not counted, and what
// it has given out goes back through it, so that it stays for the life of the process.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>

namespace {

std::atomic<int64_t> live{0}, most{0};

// A size stands before each block: torch asks that what frees a block be given the block itself.
constexpr size_t HEADER = 64;  // keeps torch's alignment

c10::Allocator* behind() {
  static c10::Allocator* const torchs = c10::GetCPUAllocator();
  return torchs;
}

void give_back(void* block) {
  char* start = static_cast<char*>(block) - HEADER;
  live -= *reinterpret_cast<int64_t*>(start);
  behind()->raw_deleter()(start);
}

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return behind()->allocate(0);
    c10::DataPtr memory = behind()->allocate(bytes + HEADER);
    const c10::Device device = memory.device();
    char* start = static_cast<char*>(memory.release_context());
    *reinterpret_cast<int64_t*>(start) = static_cast<int64_t>(bytes);
    const int64_t now = live += static_cast<int64_t>(bytes);
    int64_t before = most.load();
    while (now > before && !most.compare_exchange_weak(before, now)) {
    }
    return {start + HEADER, start + HEADER, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

void start_counting() {
  static Counter counter;
  if (behind()->raw_deleter() != nullptr) c10::SetCPUAllocator(&counter, 1);
}

int64_t live_bytes() { return live.load(); }

int64_t take_most() { return most.exchange(live.load()); }
}

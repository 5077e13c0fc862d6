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

struct Given {
  c10::DataPtr memory;
  int64_t bytes;
};

void give_back(void* context) {
  auto* given = static_cast<Given*>(context);
  live -= given->bytes;
  delete given;
}

struct Counter final : c10::Allocator {
  c10::Allocator* behind = c10::GetCPUAllocator();

  c10::DataPtr allocate(size_t bytes) override {
    auto* given = new Given{behind->allocate(bytes), static_cast<int64_t>(bytes)};
    const int64_t now = live += given->bytes;
    int64_t before = most.load();
    while (now > before && !most.compare_exchange_weak(before, now)) {
    }
    return {given->memory.get(), given, &give_back, given->memory.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

void start_counting() {
  static Counter counter;
  c10::SetCPUAllocator(&counter, 1);
}

int64_t live_bytes() { return live.load(); }

int64_t take_most() { return most.exchange(live.load()); }
}

// Runs one Metal grid on one CPU thread. Every Metal thread is a fiber that gives way only at simdgroup functions and barriers; in
// between, the order of lanes, simdgroups and threadgroups is the schedule's to choose, so what depends on it is a race.
//
// The kernel is compiled with the compiler's thread-sanitizer and undefined-behaviour instrumentation, but the callbacks are ours (at the
// end): every access to memory is checked before it happens. Knows nothing of Python, MLX or file formats.
#include "memory.h"
#include "runtime.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

extern "C" void emu_entry(void** buffers, const EmuIds* ids);  // generated with the kernel

namespace {

constexpr unsigned kLanes = 32, kMaxThreads = 1024, kStackBytes = 128 * 1024;
constexpr unsigned long kMaxThreadgroupBytes = 32 * 1024;
enum class Order { kForward, kReverse, kRandom };
enum State : unsigned char { kReady, kAtSimd, kAtBarrier, kDone };

struct Fiber {
  EmuIds ids;
  jmp_buf at;
  char* stack;
  bool primed;
  State state;
  int kind, line;
  unsigned argument, size;
  EmuSlot value;
};

struct Simdgroup {
  unsigned first, count;
  unsigned clock[2];  // simdgroup barriers passed, by kind of memory
  unsigned order[kLanes];
  EmuSlot lanes[kLanes];
};

Fiber fibers[kMaxThreads];
Simdgroup simdgroups[kMaxThreads / kLanes];
unsigned num_threads, num_simdgroups, threadgroup_number, group_clock[2];
Fiber* current;
jmp_buf scheduler, failure;
void** buffers;
Memory memory;
unsigned num_buffers;
uint64_t random_state, meetings;
Order order;
char* message;
size_t message_size;
void* fault;

unsigned random_below(unsigned n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return unsigned((random_state >> 16) % n);
}

void arrange(unsigned* places, unsigned n) {
  for (unsigned i = 0; i < n; ++i) places[i] = order == Order::kReverse ? n - 1 - i : i;
  if (order != Order::kRandom) return;
  for (unsigned i = n; i > 1; --i) {
    const unsigned j = random_below(i), held = places[i - 1];
    places[i - 1] = places[j];
    places[j] = held;
  }
}

[[noreturn]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(message, message_size, format, arguments);
  va_end(arguments);
  if (current && n > 0 && size_t(n) < message_size) {
    const EmuPosition t = current->ids.thread_position_in_threadgroup, g = current->ids.threadgroup_position_in_grid;
    snprintf(message + n, message_size - n, " [thread (%u, %u, %u) of threadgroup (%u, %u, %u)]", t.x, t.y, t.z, g.x, g.y, g.z);
  }
  _longjmp(failure, 1);
}

[[noreturn]] void fail_with(const Fault& bad) {
  if (!bad.buffer) fail("%s", bad.what);
  fail("%s: byte %ld of %s (%lu bytes)", bad.what, bad.byte, bad.buffer, bad.size);
}

// ---- fibers

void give_way() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    emu_entry(buffers, &current->ids);
    current->state = kDone;
    give_way();
  }
}

void resume(Fiber* fiber) {
  current = fiber;
  if (!_setjmp(scheduler)) {
    if (fiber->primed) _longjmp(fiber->at, 1);
    fiber->primed = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber->stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
  }
  current = nullptr;
}

// ---- one threadgroup

// All lanes have stopped, at least one in a simdgroup function: they must all stand at the same one.
void release_simdgroup(Simdgroup& group) {
  const Fiber* reference = nullptr;
  for (unsigned i = 0; i < group.count && !reference; ++i)
    if (fibers[group.first + i].state == kAtSimd) reference = &fibers[group.first + i];
  for (unsigned i = 0; i < group.count; ++i) {
    Fiber& lane = fibers[group.first + i];
    current = &lane;
    if (lane.state == kDone) fail("divergence: this lane has returned, others wait in a simdgroup function (line %d)", reference->line);
    if (lane.state == kAtBarrier)
      fail("divergence: lanes of a simdgroup wait in threadgroup_barrier (line %d) and in a simdgroup function (line %d)", lane.line, reference->line);
    if (lane.kind != reference->kind || lane.line != reference->line || lane.size != reference->size)
      fail("divergence: lanes of a simdgroup wait in different simdgroup functions (lines %d and %d)", reference->line, lane.line);
    if (lane.argument != reference->argument) fail("the argument of the simdgroup function at line %d differs between lanes", lane.line);
    group.lanes[i] = lane.value;
    lane.state = kReady;
  }
  if (group.count < kLanes && reference->kind != EMU_BARRIER) fail("a simdgroup function in a simdgroup of %u lanes (line %d)", group.count, reference->line);
  current = nullptr;
  if (reference->kind == EMU_BARRIER)
    for (unsigned k = 0; k < 2; ++k) group.clock[k] += (reference->argument >> k) & 1u;
  ++meetings;
}

// Runs a simdgroup up to its next meeting. False: all of it waits at a threadgroup barrier or has returned.
bool advance(Simdgroup& group) {
  unsigned waiting = 0;
  for (unsigned i = 0; i < group.count; ++i) {
    Fiber& lane = fibers[group.first + group.order[i]];
    if (lane.state == kReady) resume(&lane);
    waiting += lane.state == kAtSimd;
  }
  if (!waiting) return false;
  release_simdgroup(group);
  if (order == Order::kRandom) arrange(group.order, group.count);
  return true;
}

void release_barrier() {
  const Fiber* reference = nullptr;
  for (unsigned i = 0; i < num_threads; ++i) {
    current = &fibers[i];
    if (current->state == kDone) continue;
    if (!reference) reference = current;
    if (current->line != reference->line || current->argument != reference->argument)
      fail("threads of one threadgroup wait in different threadgroup_barriers (lines %d and %d)", reference->line, current->line);
  }
  for (unsigned i = 0; i < num_threads; ++i) {
    current = &fibers[i];
    if (current->state == kDone) fail("this thread has returned, others wait in threadgroup_barrier (line %d)", reference->line);
    current->state = kReady;
  }
  current = nullptr;
  for (unsigned k = 0; k < 2; ++k) group_clock[k] += (reference->argument >> k) & 1u;
}

void run_threadgroup() {
  unsigned places[kMaxThreads / kLanes];
  for (;;) {
    arrange(places, num_simdgroups);
    for (bool moved = true; moved;) {
      moved = false;
      for (unsigned i = 0; i < num_simdgroups; ++i) {
        while (advance(simdgroups[places[i]])) {
          moved = true;
          if (order == Order::kRandom) break;  // one meeting, then another simdgroup
        }
      }
    }
    unsigned at_barrier = 0;
    for (unsigned i = 0; i < num_threads; ++i) at_barrier += fibers[i].state == kAtBarrier;
    if (!at_barrier) return;
    release_barrier();
  }
}

unsigned smaller(unsigned a, unsigned b) { return a < b ? a : b; }

void place_threads(EmuPosition where, EmuPosition grid, EmuPosition full, EmuPosition count) {
  const EmuPosition size = {smaller(full.x, grid.x - where.x * full.x), smaller(full.y, grid.y - where.y * full.y), smaller(full.z, grid.z - where.z * full.z)};
  num_threads = size.x * size.y * size.z;
  num_simdgroups = (num_threads + kLanes - 1) / kLanes;
  group_clock[0] = group_clock[1] = 0;
  for (unsigned g = 0; g < num_simdgroups; ++g) {
    Simdgroup& group = simdgroups[g];
    group.first = g * kLanes;
    group.count = smaller(kLanes, num_threads - group.first);
    group.clock[0] = group.clock[1] = 0;
    arrange(group.order, group.count);
  }
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack = static_cast<char*>(malloc(kStackBytes));
    fiber.state = kReady;
    EmuIds& ids = fiber.ids;
    ids.thread_position_in_threadgroup = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    const EmuPosition t = ids.thread_position_in_threadgroup;
    ids.thread_position_in_grid = {where.x * full.x + t.x, where.y * full.y + t.y, where.z * full.z + t.z};
    ids.threadgroup_position_in_grid = where;
    ids.threads_per_threadgroup = size;
    ids.threads_per_grid = grid;
    ids.threadgroups_per_grid = count;
    ids.thread_index_in_threadgroup = i;
    ids.thread_index_in_simdgroup = i % kLanes;
    ids.simdgroup_index_in_threadgroup = i / kLanes;
    ids.simdgroups_per_threadgroup = num_simdgroups;
    ids.threads_per_simdgroup = kLanes;
  }
}

// ---- what the instrumented kernel calls

void touch(const void* pointer, unsigned size, bool writes, void* caller) {
  const char* stack = current ? current->stack : nullptr;
  if (!current || (pointer >= stack && pointer < stack + kStackBytes)) return;
  const unsigned simdgroup = current->ids.simdgroup_index_in_threadgroup;
  const Simdgroup& group = simdgroups[simdgroup];
  const Actor actor = {threadgroup_number, current->ids.thread_index_in_threadgroup, simdgroup, {{group_clock[0], group.clock[0]}, {group_clock[1], group.clock[1]}}};
  const Fault* bad = memory.touch(actor, pointer, size, writes);
  if (!bad) return;
  fault = caller;
  fail_with(*bad);
}

}  // namespace

extern "C" {

const EmuSlot* emu_meet(const void* value, unsigned size, int kind, unsigned argument, int line) {
  Fiber* me = current;
  memcpy(me->value.bytes, value, size);
  me->kind = kind, me->argument = argument, me->size = size, me->line = line;
  me->state = kAtSimd;
  give_way();
  return simdgroups[me->ids.simdgroup_index_in_threadgroup].lanes;
}

unsigned emu_lane(void) { return current->ids.thread_index_in_simdgroup; }

void emu_threadgroup_barrier(unsigned flags, int line) {
  current->argument = flags, current->line = line;
  current->state = kAtBarrier;
  give_way();
}

void emu_threadgroup_variable(void* start, unsigned long size, const char* name) {
  unsigned long total = size;
  for (unsigned i = num_buffers; i < memory.num_regions; ++i) {
    if (memory.regions[i].start == reinterpret_cast<uintptr_t>(start)) return;
    total += memory.regions[i].size();
  }
  if (total > kMaxThreadgroupBytes) fail("%lu bytes of threadgroup memory, the limit is %lu", total, kMaxThreadgroupBytes);
  memset(start, 0xff, size);
  if (!memory.add(name, start, size, kThreadgroup, true, false)) fail("too many threadgroup variables");
}

void emu_fail(const char* what, int line) { fail("%s (line %d)", what, line); }

struct EmuBuffer {
  const char* name;
  void* start;
  unsigned long size;
  int writable, initialised;
  uint64_t bytes_read, bytes_written, bytes_loaded;
};

// Runs the grid. 0, or 1 with `text` saying what went wrong and `*where` the instruction that did it (0 if the text has the line).
__attribute__((visibility("default"))) int emu_run(EmuBuffer* list, unsigned n, const unsigned* g, const unsigned* t, int how, unsigned long seed,
                                                   char* text, size_t text_size, void** where, uint64_t* num_meetings) {
  static void* starts[Memory::kMaxRegions];
  static unsigned* places;
  message = text, message_size = text_size, order = Order(how), random_state = seed * 0x9E3779B97F4A7C15ull + 1;
  buffers = starts, current = nullptr, fault = nullptr, meetings = 0, threadgroup_number = 0;
  for (Fiber& fiber : fibers) fiber.primed = false;  // a run that failed left some in mid-kernel
  int status = _setjmp(failure);
  if (!status) {
    for (unsigned i = 0; i < n; ++i) {
      starts[i] = list[i].start;
      if (!memory.add(list[i].name, list[i].start, list[i].size, kDevice, list[i].writable, list[i].initialised)) fail("too many buffers");
    }
    num_buffers = n;
    const EmuPosition grid = {g[0], g[1], g[2]}, full = {smaller(t[0], g[0]), smaller(t[1], g[1]), smaller(t[2], g[2])};
    if (full.x * full.y * full.z > kMaxThreads) fail("%u threads a threadgroup, the limit is %u", full.x * full.y * full.z, kMaxThreads);
    const EmuPosition count = {(grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y, (grid.z + full.z - 1) / full.z};
    const unsigned total = count.x * count.y * count.z;
    places = static_cast<unsigned*>(realloc(places, total * sizeof(unsigned)));
    arrange(places, total);
    for (unsigned i = 0; i < total; ++i) {
      const unsigned w = places[i];
      ++threadgroup_number;
      place_threads({w % count.x, w / count.x % count.y, w / count.x / count.y}, grid, full, count);
      run_threadgroup();
    }
    if (const Fault* bad = memory.unwritten(n)) fail_with(*bad);
  }
  for (unsigned i = 0; i < n && i < memory.num_regions; ++i) {
    list[i].bytes_read = memory.regions[i].bytes_read;
    list[i].bytes_written = memory.regions[i].bytes_written;
    list[i].bytes_loaded = memory.regions[i].bytes_loaded;
  }
  *num_meetings = meetings;
  *where = status ? fault : nullptr;
  current = nullptr;
  memory.clear();
  return status;
}

// ---- the callbacks of -fsanitize=thread
#define EMU_ACCESS(SUFFIX, SIZE)                                                                        \
  void __tsan_read##SUFFIX(void* p) { touch(p, SIZE, false, __builtin_return_address(0)); }             \
  void __tsan_write##SUFFIX(void* p) { touch(p, SIZE, true, __builtin_return_address(0)); }             \
  void __tsan_unaligned_read##SUFFIX(void* p) { touch(p, SIZE, false, __builtin_return_address(0)); }   \
  void __tsan_unaligned_write##SUFFIX(void* p) { touch(p, SIZE, true, __builtin_return_address(0)); }
EMU_ACCESS(1, 1) EMU_ACCESS(2, 2) EMU_ACCESS(4, 4) EMU_ACCESS(8, 8) EMU_ACCESS(16, 16)
void __tsan_read_range(void* p, unsigned long n) { touch(p, unsigned(n), false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { touch(p, unsigned(n), true, __builtin_return_address(0)); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
void __tsan_init(void) {}

// ---- the callbacks of -fsanitize=undefined: each is told first where in the source it happened
struct EmuSource {
  const char* file;
  unsigned line, column;
};
#define EMU_UNDEFINED(NAME, WHAT) \
  void __ubsan_handle_##NAME##_abort(const EmuSource* where) { fail("%s (line %u)", WHAT, where->line); }
EMU_UNDEFINED(out_of_bounds, "index outside a local array")
EMU_UNDEFINED(type_mismatch_v1, "misaligned access")
EMU_UNDEFINED(shift_out_of_bounds, "shift by more than the width")
EMU_UNDEFINED(divrem_overflow, "division by zero")
EMU_UNDEFINED(add_overflow, "integer overflow")
EMU_UNDEFINED(sub_overflow, "integer overflow")
EMU_UNDEFINED(mul_overflow, "integer overflow")
EMU_UNDEFINED(negate_overflow, "integer overflow")
}

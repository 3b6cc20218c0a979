// What the emulated Metal library (metal_stdlib) asks of the runtime, and what generated code asks of both.
// Plain C interface: knows no Metal types beyond thread positions.
#pragma once

struct EmuPosition {
  unsigned x, y, z;
};

// The thread attributes of the Metal Shading Language that kernels may name.
struct EmuIds {
  EmuPosition thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  EmuPosition threads_per_threadgroup, threads_per_grid, threadgroups_per_grid;
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  unsigned simdgroups_per_threadgroup, threads_per_simdgroup;
};

struct EmuSlot {
  alignas(16) unsigned char bytes[16];
};

extern "C" {
// Waits until every lane of the simdgroup stands at the same call (same kind, line and argument), then returns the 32 lanes' values.
const EmuSlot* emu_meet(const void* value, unsigned size, int kind, unsigned argument, int line);
unsigned emu_lane(void);
void emu_threadgroup_barrier(unsigned flags, int line);
// Makes a threadgroup variable known: bounds, races and reads before the first write are checked from here on.
void emu_threadgroup_variable(void* start, unsigned long size, const char* name);
[[noreturn]] void emu_fail(const char* what, int line);
}

enum EmuKind { EMU_SHUFFLE = 1, EMU_SHUFFLE_XOR, EMU_SHUFFLE_DOWN, EMU_SHUFFLE_UP, EMU_BROADCAST, EMU_REDUCE, EMU_SCAN, EMU_BARRIER, EMU_MATRIX };

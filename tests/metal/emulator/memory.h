// The memory an emulated kernel may touch: buffers and threadgroup variables, each granule of 2 bytes with a record of who last read and
// wrote it. Checks every access (bounds, initialisation, races) and counts bytes: each once per threadgroup that touched it, and those of
// all loads of all threads.
// Knows nothing of fibers and schedules: an Actor says who touches and which barriers have been passed.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum MemoryKind { kDevice = 0, kThreadgroup = 1 };

struct Actor {
  unsigned threadgroup;  // numbered from 1 in the order they run
  unsigned thread, simdgroup;
  unsigned clock[2][2];  // by kind of memory: [barriers of the threadgroup, barriers of the simdgroup] passed
};

struct Fault {
  const char* what;
  const char* buffer;  // null: no buffer at all
  long byte;
  unsigned long size;
};

// What was last done to one granule. Threadgroup 0 means never.
struct Cell {
  unsigned read_group, write_group;
  unsigned short reader, reader_simdgroup;  // Memory::kMany: several since the last barrier
  unsigned short writer, writer_simdgroup;
  unsigned read_clock[2], write_clock[2];
};

class Memory {
 public:
  static constexpr unsigned kGranule = 2, kMaxRegions = 64, kMany = 0xffff;

  struct Region {
    const char* name;
    uintptr_t start, end;
    MemoryKind kind;
    bool writable, initialised;
    unsigned* read_group;  // inputs need only this
    Cell* cells;           // outputs and threadgroup variables
    uint64_t bytes_read, bytes_written, bytes_loaded;
    unsigned long size() const { return end - start; }
  };

  Region regions[kMaxRegions];
  unsigned num_regions = 0;

  // False when there are too many.
  bool add(const char* name, void* memory, unsigned long size, MemoryKind kind, bool writable, bool initialised);
  void clear();
  // Null when all is well.
  const Fault* touch(const Actor& actor, const void* pointer, unsigned size, bool writes);
  // The first output, among the first n regions, of which a byte was never written; null when there is none.
  const Fault* unwritten(unsigned n);

 private:
  Fault fault_;
  const Fault* report(const Region& region, uintptr_t address, const char* what) {
    fault_ = {what, region.name, long(address - region.start), region.size()};
    return &fault_;
  }
  const Fault* touch_cell(const Actor& actor, Region& region, Cell& cell, uintptr_t address, bool writes);
};

inline bool Memory::add(const char* name, void* memory, unsigned long size, MemoryKind kind, bool writable, bool initialised) {
  if (num_regions == kMaxRegions) return false;
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
  Region& region = regions[num_regions++];
  region = {name, start, start + size, kind, writable, initialised, nullptr, nullptr, 0, 0, 0};
  if (writable) region.cells = static_cast<Cell*>(calloc(size / kGranule + 1, sizeof(Cell)));
  else region.read_group = static_cast<unsigned*>(calloc(size / kGranule + 1, sizeof(unsigned)));
  return true;
}

inline void Memory::clear() {
  for (unsigned i = 0; i < num_regions; ++i) {
    free(regions[i].cells);
    free(regions[i].read_group);
  }
  num_regions = 0;
}

inline const Fault* Memory::touch(const Actor& actor, const void* pointer, unsigned size, bool writes) {
  const char* outside = writes ? "write out of bounds" : "read out of bounds";
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  Region* region = nullptr;
  for (unsigned i = num_regions; i-- > 0 && !region;)
    if (address >= regions[i].start && address < regions[i].end) region = &regions[i];
  if (!region) {
    for (unsigned i = 0; i < num_regions; ++i)  // name the buffer it just missed
      if (address + 4096 >= regions[i].start && address < regions[i].end + 4096) return report(regions[i], address, outside);
    fault_ = {writes ? "write to memory that belongs to no buffer" : "read of memory that belongs to no buffer", nullptr, 0, 0};
    return &fault_;
  }
  if (address + size > region->end) return report(*region, address + size - 1, outside);
  if (writes && !region->writable) return report(*region, address, "write to an input");
  if (!writes) region->bytes_loaded += size;
  const uintptr_t last = (address + size - 1 - region->start) / kGranule;
  for (uintptr_t granule = (address - region->start) / kGranule; granule <= last; ++granule) {
    if (region->cells) {
      const Fault* fault = touch_cell(actor, *region, region->cells[granule], region->start + granule * kGranule, writes);
      if (fault) return fault;
    } else if (region->read_group[granule] != actor.threadgroup) {
      region->read_group[granule] = actor.threadgroup;
      region->bytes_read += kGranule;
    }
  }
  return nullptr;
}

// Whether a barrier lies between what another thread did, at `then`, and now.
inline bool is_ordered(const unsigned* then, const unsigned* now, bool same_simdgroup) {
  return then[0] < now[0] || (same_simdgroup && then[1] < now[1]);
}

inline const Fault* Memory::touch_cell(const Actor& actor, Region& region, Cell& cell, uintptr_t address, bool writes) {
  const unsigned* now = actor.clock[region.kind];
  const bool written_here = cell.write_group == actor.threadgroup, read_here = cell.read_group == actor.threadgroup;
  const bool has_value = region.initialised || (region.kind == kDevice ? cell.write_group != 0 : written_here);
  if (!writes && !has_value) return report(region, address, "read of memory that nobody has written");
  if (region.kind == kDevice && ((cell.write_group && !written_here) || (writes && cell.read_group && !read_here)))
    return report(region, address, "race between threadgroups");
  if (written_here && cell.writer != actor.thread && !is_ordered(cell.write_clock, now, cell.writer_simdgroup == actor.simdgroup))
    return report(region, address, writes ? "race: two threads write, no barrier between" : "race: read after another thread's write, no barrier between");
  if (writes && read_here && cell.reader != actor.thread && !is_ordered(cell.read_clock, now, cell.reader_simdgroup == actor.simdgroup))
    return report(region, address, "race: write after another thread's read, no barrier between");
  if (writes) {
    region.bytes_written += written_here ? 0 : kGranule;
    cell.write_group = actor.threadgroup;
    cell.writer = (unsigned short)actor.thread;
    cell.writer_simdgroup = (unsigned short)actor.simdgroup;
    memcpy(cell.write_clock, now, sizeof cell.write_clock);
    return nullptr;
  }
  region.bytes_read += read_here ? 0 : kGranule;
  const bool joins = read_here && !is_ordered(cell.read_clock, now, cell.reader_simdgroup == actor.simdgroup);
  cell.reader = (unsigned short)(joins && cell.reader != actor.thread ? kMany : actor.thread);
  cell.reader_simdgroup = (unsigned short)(joins && cell.reader_simdgroup != actor.simdgroup ? kMany : actor.simdgroup);
  cell.read_group = actor.threadgroup;
  memcpy(cell.read_clock, now, sizeof cell.read_clock);
  return nullptr;
}

inline const Fault* Memory::unwritten(unsigned n) {
  for (unsigned i = 0; i < n; ++i) {
    const Region& region = regions[i];
    if (!region.writable || region.initialised) continue;
    for (unsigned long granule = 0; granule * kGranule < region.size(); ++granule)
      if (!region.cells[granule].write_group) return report(region, region.start + granule * kGranule, "output not fully written");
  }
  return nullptr;
}

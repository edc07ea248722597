/* libnccl of pretended devices: the ranks of one machine meet in shared memory.

   A collective waits for its peers in the calling thread. What each rank has called is compared: a mismatch is misuse,
   and so is a peer that does not come. With PRETENDED_ALONE=1 no rank is waited for: each gets what it would get if all
   ranks were alike, which is enough to measure one rank's memory. */
#define _GNU_SOURCE
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#include "nccl.h"
#include "shared.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 16
#define STAGE (1u << 20)   /* bytes that a rank shows at once */
#define CHANNEL (1u << 18) /* bytes on their way from one rank to another */

typedef struct {
  char name[24];
  uint64_t count;
  int64_t type, root, operation;
} Call;
typedef struct {
  atomic_ulong phase;
  Call call;
  int color, key;
} Slot;
typedef struct {
  atomic_uint full;
  uint32_t bytes;
  char data[CHANNEL];
} Channel;
typedef struct {
  atomic_int joined, is_aborted;
  Slot slots[MAX_RANKS];
} Shared;
struct ncclComm {
  Shared *shared;
  char *stages;
  Channel *channels;
  size_t mapped_bytes;
  char id[48];
  int num_ranks, rank, device, splits;
  uint64_t phase;
  pthread_mutex_t lock;
};

static int is_alone(void) { return pretended_setting("PRETENDED_ALONE", 0) != 0; }
static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}
static double patience(void) { return (double)pretended_setting("PRETENDED_PATIENCE_SECONDS", 120); }
static void pause_a_little(unsigned *turns) {
  struct timespec nap = {0, 100000};
  if (++*turns < 100) sched_yield();
  else nanosleep(&nap, NULL);
}
static size_t size_of(ncclDataType_t type) {
  static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return (size_t)type < sizeof SIZES / sizeof *SIZES ? SIZES[type] : 1;
}

/* Meeting */

static ncclResult_t meet(ncclComm_t comm, const char *what) { /* every rank has come to here */
  uint64_t phase = ++comm->phase;
  double deadline = seconds() + patience();
  unsigned turns = 0;
  atomic_store(&comm->shared->slots[comm->rank].phase, phase);
  for (int peer = 0; peer < comm->num_ranks; peer++)
    while (atomic_load(&comm->shared->slots[peer].phase) < phase) {
      if (atomic_load(&comm->shared->is_aborted)) return ncclRemoteError;
      if (seconds() > deadline) {
        pretended_misuse("rank %d of %d waits in %s for rank %d, which was last in %s", comm->rank, comm->num_ranks,
                         what, peer, comm->shared->slots[peer].call.name);
        return ncclSystemError;
      }
      pause_a_little(&turns);
    }
  return ncclSuccess;
}

static ncclResult_t agree(ncclComm_t comm, Call call) {
  Slot *slots = comm->shared->slots;
  int differs = 0;
  slots[comm->rank].call = call;
  ncclResult_t error = meet(comm, call.name);
  if (error) return error;
  for (int peer = 0; peer < comm->num_ranks; peer++) {
    Call *other = &slots[peer].call;
    if (!memcmp(other, &call, sizeof call)) continue;
    differs = 1;
    pretended_misuse("rank %d calls %s of %lu elements of type %ld, rank %d calls %s of %lu of type %ld", comm->rank,
                     call.name, (unsigned long)call.count, (long)call.type, peer, other->name,
                     (unsigned long)other->count, (long)other->type);
  }
  error = meet(comm, call.name); /* nobody writes its next call before all have compared this one */
  return error ? error : differs ? ncclInvalidUsage : ncclSuccess;
}

/* Communicators */

static int open_shared(ncclComm_t comm) {
  char name[80];
  size_t head = (sizeof(Shared) + 4095) / 4096 * 4096, ranks = (size_t)comm->num_ranks;
  snprintf(name, sizeof name, "/pretended-%s", comm->id);
  comm->mapped_bytes = head + ranks * STAGE + ranks * ranks * sizeof(Channel);
  int file = shm_open(name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)comm->mapped_bytes)) return 1;
  char *base = mmap(NULL, comm->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (base == MAP_FAILED) return 1;
  comm->shared = (Shared *)base;
  comm->stages = base + head;
  comm->channels = (Channel *)(comm->stages + ranks * STAGE);
  if (is_alone()) return shm_unlink(name);
  int place = atomic_fetch_add(&comm->shared->joined, 1) + 1;
  double deadline = seconds() + patience();
  unsigned turns = 0;
  while (atomic_load(&comm->shared->joined) < comm->num_ranks) {
    if (seconds() > deadline) {
      pretended_misuse("rank %d: %d of %d ranks have joined", comm->rank, comm->shared->joined, comm->num_ranks);
      return 1;
    }
    pause_a_little(&turns);
  }
  if (place == comm->num_ranks) shm_unlink(name);
  return 0;
}
static ncclResult_t make(ncclComm_t *made, const char *id, int num_ranks, int rank) {
  if (num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
  ncclComm_t comm = calloc(1, sizeof *comm);
  snprintf(comm->id, sizeof comm->id, "%s", id);
  comm->num_ranks = num_ranks;
  comm->rank = rank;
  comm->device = pretended_device();
  pthread_mutex_init(&comm->lock, NULL);
  pretended_touch_context(comm->device);
  if (open_shared(comm)) return ncclSystemError;
  *made = comm;
  return ncclSuccess;
}
ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  unsigned char bytes[8];
  memset(id, 0, sizeof *id);
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) return ncclSystemError;
  for (int i = 0; i < 8; i++) sprintf(id->internal + 2 * i, "%02x", bytes[i]);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t *how) {
  return (void)how, make(made, id.internal, num_ranks, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t *made, int num_ranks, ncclUniqueId id, int rank) {
  return make(made, id.internal, num_ranks, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *how) {
  Slot *slots = comm->shared->slots;
  char id[48];
  (void)how;
  slots[comm->rank].color = color;
  slots[comm->rank].key = key;
  *made = NULL;
  ncclResult_t error = agree(comm, (Call){.name = "CommSplit"});
  if (error) return error;
  int num_ranks = 0, rank = 0;
  for (int peer = 0; peer < comm->num_ranks; peer++) {
    if (slots[peer].color != color) continue;
    num_ranks++;
    rank += slots[peer].key < key || (slots[peer].key == key && peer < comm->rank);
  }
  snprintf(id, sizeof id, "%.24ss%dc%d", comm->id, ++comm->splits, color);
  if ((error = meet(comm, "CommSplit")) || color == NCCL_SPLIT_NOCOLOR) return error;
  return make(made, id, num_ranks, rank);
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return (void)comm, ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  munmap(comm->shared, comm->mapped_bytes);
  free(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return atomic_store(&comm->shared->is_aborted, 1), ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  return (void)comm, *error = ncclSuccess, ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return *count = comm->num_ranks, ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { return *device = comm->device, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle) {
  return (void)comm, (void)bytes, *handle = buffer, ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { return (void)comm, (void)handle, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t error) {
  return !error                     ? "no error"
         : error == ncclSystemError ? "a peer did not come to the pretended collective"
         : error == ncclInvalidUsage ? "ranks disagree about a pretended collective"
                                     : "error of the pretended NCCL";
}
const char *ncclGetLastError(ncclComm_t comm) { return (void)comm, ""; }

/* Reduction, in double precision */

static float of_half(uint16_t half) {
  _Float16 value;
  memcpy(&value, &half, sizeof value);
  return (float)value;
}
static double read_element(const void *from, size_t i, ncclDataType_t type) {
  uint32_t bits;
  float value;
  switch (type) {
  case ncclInt8: return ((const int8_t *)from)[i];
  case ncclUint8: return ((const uint8_t *)from)[i];
  case ncclInt32: return ((const int32_t *)from)[i];
  case ncclUint32: return ((const uint32_t *)from)[i];
  case ncclInt64: return (double)((const int64_t *)from)[i];
  case ncclUint64: return (double)((const uint64_t *)from)[i];
  case ncclFloat16: return of_half(((const uint16_t *)from)[i]);
  case ncclFloat32: return ((const float *)from)[i];
  case ncclFloat64: return ((const double *)from)[i];
  default: break;
  }
  bits = (uint32_t)((const uint16_t *)from)[i] << 16; /* bfloat16 */
  memcpy(&value, &bits, sizeof value);
  return value;
}
static void write_element(void *to, size_t i, ncclDataType_t type, double value) {
  _Float16 half = (_Float16)value;
  float single = (float)value;
  uint32_t bits;
  switch (type) {
  case ncclInt8: ((int8_t *)to)[i] = (int8_t)value; return;
  case ncclUint8: ((uint8_t *)to)[i] = (uint8_t)value; return;
  case ncclInt32: ((int32_t *)to)[i] = (int32_t)value; return;
  case ncclUint32: ((uint32_t *)to)[i] = (uint32_t)value; return;
  case ncclInt64: ((int64_t *)to)[i] = (int64_t)value; return;
  case ncclUint64: ((uint64_t *)to)[i] = (uint64_t)value; return;
  case ncclFloat16: memcpy((uint16_t *)to + i, &half, sizeof half); return;
  case ncclFloat32: ((float *)to)[i] = single; return;
  case ncclFloat64: ((double *)to)[i] = value; return;
  default: break;
  }
  memcpy(&bits, &single, sizeof bits);
  if (value == value) bits += 0x7fff + (bits >> 16 & 1); /* to the nearest bfloat16, ties to even */
  ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
}
static double factors[64];
static atomic_int num_factors;
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *made, void *factor, ncclDataType_t type,
                                      ncclScalarResidence_t where, ncclComm_t comm) {
  (void)where, (void)comm;
  int number = atomic_fetch_add(&num_factors, 1) % 64;
  factors[number] = read_element(factor, 0, type);
  *made = (ncclRedOp_t)(ncclNumOps + number);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t made, ncclComm_t comm) { return (void)made, (void)comm, ncclSuccess; }

static double combined(double a, double b, ncclRedOp_t how) {
  if (how == ncclProd) return a * b;
  if (how == ncclMax) return a > b || a != a ? a : b;
  if (how == ncclMin) return a < b || a != a ? a : b;
  return a + b;
}
static void reduce(ncclComm_t comm, char *to, size_t offset, size_t count, ncclDataType_t type, ncclRedOp_t how) {
  for (size_t i = 0; i < count; i++) {
    double value = read_element(comm->stages + offset, i, type);
    for (int peer = 1; peer < comm->num_ranks; peer++)
      value = combined(value, read_element(comm->stages + (size_t)peer * STAGE + offset, i, type), how);
    if (how == ncclAvg) value /= comm->num_ranks;
    if ((int)how >= (int)ncclNumOps) value *= factors[(int)how - (int)ncclNumOps];
    write_element(to, i, type, value);
  }
}

/* Collectives */

typedef struct {
  const char *name;
  const char *from;
  char *to;
  size_t count, from_parts, to_parts; /* elements of a part; parts that a rank gives and gets */
  ncclDataType_t type;
  ncclRedOp_t how;
  int root;
  ncclComm_t comm;
  cudaStream_t stream;
} Work;

static void check_buffer(const Work *work, const char *which, const void *buffer, size_t bytes) {
  Block block;
  if (!bytes) return;
  if (!pretended_find(buffer, &block) || block.kind != DEVICE_MEMORY)
    pretended_misuse("%s: the %s buffer is no device memory", work->name, which);
  else if ((uint64_t)buffer + bytes > block.base + block.size)
    pretended_misuse("%s: the %s buffer runs past its block", work->name, which);
  else if (block.device != work->comm->device)
    pretended_misuse("%s: the %s buffer is on device %d, the communicator on device %d", work->name, which,
                     block.device, work->comm->device);
}
static void check_and_log(const Work *work) {
  size_t bytes = work->count * size_of(work->type);
  pretended_count(COLLECTIVES, 1);
  check_buffer(work, "send", work->from, bytes * work->from_parts);
  check_buffer(work, "receive", work->to, bytes * work->to_parts);
  if (pretended_stream_device(work->stream) != work->comm->device)
    pretended_misuse("%s: a stream of another device than the communicator's", work->name);
  pretended_log("\"op\":\"collective\",\"name\":\"%s\",\"communicator\":\"%s\",\"rank\":%d,\"ranks\":%d,"
                "\"count\":%zu,\"type\":%d,\"stream\":%d,\"from\":%llu,\"from_bytes\":%zu,\"to\":%llu,\"to_bytes\":%zu",
                work->name, work->comm->id, work->comm->rank, work->comm->num_ranks, work->count, (int)work->type,
                pretended_stream_id(work->stream), (unsigned long long)work->from, bytes * work->from_parts,
                (unsigned long long)work->to, bytes * work->to_parts);
}

typedef void (*Take)(const Work *work, size_t offset, size_t bytes, size_t step);

static char *stage_of(const Work *work, int rank) { return work->comm->stages + (size_t)rank * STAGE; }
static void take_all(const Work *work, size_t offset, size_t bytes, size_t step) {
  size_t part = work->count * size_of(work->type);
  (void)step;
  for (int peer = 0; peer < work->comm->num_ranks; peer++)
    memcpy(work->to + (size_t)peer * part + offset, stage_of(work, peer), bytes);
}
static void take_own_part_of_all(const Work *work, size_t offset, size_t bytes, size_t step) {
  size_t part = work->count * size_of(work->type);
  for (int peer = 0; peer < work->comm->num_ranks; peer++)
    memcpy(work->to + (size_t)peer * part + offset, stage_of(work, peer) + (size_t)work->comm->rank * step, bytes);
}
static void take_of_root(const Work *work, size_t offset, size_t bytes, size_t step) {
  size_t part = work->from_parts > 1 || !work->from ? (size_t)work->comm->rank * step : 0;
  memcpy(work->to + offset, stage_of(work, work->root) + part, bytes);
}
static void take_sum(const Work *work, size_t offset, size_t bytes, size_t step) {
  size_t own = !strcmp(work->name, "ReduceScatter") ? (size_t)work->comm->rank * step : 0;
  reduce(work->comm, work->to + offset, own, bytes / size_of(work->type), work->type, work->how);
}

static ncclResult_t without_peers(const Work *work) {
  size_t part = work->count * size_of(work->type);
  if (part > pretended_setting("PRETENDED_LARGEST_COPY", ~0ull) || !work->from || !work->to) return ncclSuccess;
  for (size_t i = 0; i < work->to_parts; i++)
    memmove(work->to + i * part, work->from + (work->from_parts > 1 ? i : 0) * part, part);
  return ncclSuccess;
}

/* Every rank shows `shown` parts of what it gives, a piece at a time, and takes from all what it is to get. */
static ncclResult_t exchange(const Work *work, size_t shown, int takes, Take take) {
  ncclComm_t comm = work->comm;
  size_t element = size_of(work->type), part = work->count * element;
  size_t spread = work->from_parts > 1 || take == take_own_part_of_all ? (size_t)comm->num_ranks : 1;
  size_t step = STAGE / spread / element * element;
  check_and_log(work);
  if (is_alone()) return without_peers(work);
  pthread_mutex_lock(&comm->lock);
  Call call = {.count = work->count, .type = work->type, .root = work->root, .operation = work->how};
  snprintf(call.name, sizeof call.name, "%s", work->name);
  ncclResult_t error = agree(comm, call);
  for (size_t offset = 0; !error && offset < part; offset += step) {
    size_t bytes = part - offset < step ? part - offset : step;
    for (size_t i = 0; i < shown; i++)
      memcpy(stage_of(work, comm->rank) + i * step, work->from + i * part + offset, bytes);
    if ((error = meet(comm, work->name))) break;
    if (takes) take(work, offset, bytes, step);
    error = meet(comm, work->name);
  }
  pthread_mutex_unlock(&comm->lock);
  return error;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  Work work = {"AllGather", from, to, count, 1, (size_t)comm->num_ranks, type, 0, 0, comm, stream};
  return exchange(&work, 1, 1, take_all);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t how,
                               ncclComm_t comm, cudaStream_t stream) {
  Work work = {"ReduceScatter", from, to, count, (size_t)comm->num_ranks, 1, type, how, 0, comm, stream};
  return exchange(&work, (size_t)comm->num_ranks, 1, take_sum);
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t how,
                           ncclComm_t comm, cudaStream_t stream) {
  Work work = {"AllReduce", from, to, count, 1, 1, type, how, 0, comm, stream};
  return exchange(&work, 1, 1, take_sum);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t how, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  Work work = {"Reduce", from, to, count, 1, comm->rank == root, type, how, root, comm, stream};
  return exchange(&work, 1, comm->rank == root, take_sum);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  Work work = {"Broadcast", from, to, count, 1, 1, type, 0, root, comm, stream};
  if (comm->rank != root) work.from = to;
  return exchange(&work, comm->rank == root, 1, take_of_root);
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  size_t ranks = (size_t)comm->num_ranks;
  Work work = {"AlltoAll", from, to, count, ranks, ranks, type, 0, 0, comm, stream};
  return exchange(&work, ranks, 1, take_own_part_of_all);
}

/* From one rank to another, alone and in groups */

typedef struct {
  ncclComm_t comm;
  int sends, peer, is_done;
  char *data;
  size_t bytes, offset;
} Transfer;
static __thread Transfer *transfers;
static __thread int num_transfers, room_for_transfers, depth;

static Channel *channel(const Transfer *transfer) {
  size_t from = (size_t)(transfer->sends ? transfer->comm->rank : transfer->peer);
  size_t to = (size_t)(transfer->sends ? transfer->peer : transfer->comm->rank);
  return &transfer->comm->channels[from * (size_t)transfer->comm->num_ranks + to];
}
static int is_behind_another(int number) {
  for (int i = 0; i < number; i++)
    if (!transfers[i].is_done && transfers[i].comm == transfers[number].comm &&
        transfers[i].peer == transfers[number].peer && transfers[i].sends == transfers[number].sends)
      return 1;
  return 0;
}
static int move_a_piece(Transfer *transfer) {
  Channel *way = channel(transfer);
  size_t left = transfer->bytes - transfer->offset, bytes = left < CHANNEL ? left : CHANNEL;
  if ((int)atomic_load(&way->full) == transfer->sends) return 0;
  if (transfer->sends) {
    way->bytes = (uint32_t)bytes;
    memcpy(way->data, transfer->data + transfer->offset, bytes);
  } else {
    if (way->bytes > left) pretended_misuse("rank %d gets more than it asked for", transfer->comm->rank);
    bytes = way->bytes < left ? way->bytes : left;
    memcpy(transfer->data + transfer->offset, way->data, bytes);
  }
  atomic_store(&way->full, (unsigned)transfer->sends);
  transfer->offset += bytes;
  transfer->is_done = transfer->offset >= transfer->bytes;
  return 1;
}
static ncclResult_t run_transfers(void) {
  double deadline = seconds() + patience();
  unsigned turns = 0;
  for (int left = num_transfers; left;) {
    int moved = 0;
    left = 0;
    for (int i = 0; i < num_transfers; i++) {
      if (transfers[i].is_done) continue;
      if (!is_behind_another(i)) moved |= move_a_piece(&transfers[i]);
      left += !transfers[i].is_done;
    }
    if (moved) deadline = seconds() + patience();
    else if (left) pause_a_little(&turns);
    if (seconds() > deadline) {
      pretended_misuse("a group of sends and receives waits for a peer that does not come");
      return num_transfers = 0, ncclSystemError;
    }
  }
  num_transfers = 0;
  return ncclSuccess;
}
static ncclResult_t add_transfer(Transfer transfer) {
  if (is_alone() || !transfer.bytes) return ncclSuccess;
  if (num_transfers == room_for_transfers) {
    room_for_transfers = room_for_transfers ? 2 * room_for_transfers : 64;
    transfers = realloc(transfers, (size_t)room_for_transfers * sizeof *transfers);
  }
  transfers[num_transfers++] = transfer;
  return depth ? ncclSuccess : run_transfers();
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Work work = {"Send", from, NULL, count, 1, 0, type, 0, peer, comm, stream};
  check_and_log(&work);
  return add_transfer((Transfer){comm, 1, peer, 0, (char *)from, count * size_of(type), 0});
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  Work work = {"Recv", NULL, to, count, 0, 1, type, 0, peer, comm, stream};
  check_and_log(&work);
  return add_transfer((Transfer){comm, 0, peer, 0, to, count * size_of(type), 0});
}
ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return --depth == 0 && num_transfers ? run_transfers() : ncclSuccess; }

/* libcudart of a pretended device, from the documented runtime API alone.

   Device memory is host memory that is mapped when it is touched. Copies are made when they are asked for, kernels are
   counted and not run, streams and events are bookkeeping. What a real device would refuse or race over in silence
   (a stream of another device, a copy past the end of a block, a dead event) is told as misuse. */
#define _GNU_SOURCE
#include "cuda_runtime_api.h"
#include "shared.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define SEGMENT (2 * MIB)
#define REGION (1ull << 40) /* of address space for each device */
#define LIVE_STREAM 0x5712ea3u
#define LIVE_EVENT 0xe7e27u

typedef struct {
  uint32_t magic;
  int id, device, priority;
  unsigned flags;
} Stream;

typedef struct {
  uint32_t magic;
  int id, device, version;
  unsigned flags;
  uint64_t recorded_at;
} Event;

static int device_count = 1, major = 9, minor = 0;
static uint64_t total_bytes, context_bytes, largest_copy;
static char device_name[200] = "NVIDIA H100 80GB HBM3 (pretended)";
static char *regions;
static int64_t used_bytes[MAX_DEVICES];
static atomic_int has_context[MAX_DEVICES];
static __thread int current_device;
static __thread cudaError_t last_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int next_stream = 1, next_event = 1;

/* Settings, counters and the log */

static atomic_ullong counters[COUNTERS];
static void (*on_wait)(const char *);
static FILE *log_file;
static pid_t log_owner;

uint64_t pretended_setting(const char *name, uint64_t otherwise) {
  const char *value = getenv(name);
  return value && *value ? strtoull(value, NULL, 0) : otherwise;
}

void pretended_count(int counter, uint64_t amount) { atomic_fetch_add(&counters[counter], amount); }
uint64_t pretended_counter(int counter) { return atomic_load(&counters[counter]); }
void pretended_call_on_wait(void (*function)(const char *)) { on_wait = function; }

void pretended_host_wait(const char *what) {
  pretended_count(HOST_WAITS, 1);
  if (on_wait) on_wait(what);
}

static void open_log(void) {
  char path[1000];
  const char *folder = getenv("PRETENDED_LOG");
  log_owner = getpid();
  log_file = NULL;
  if (!folder || !*folder) return;
  snprintf(path, sizeof path, "%s/%d.jsonl", folder, (int)getpid());
  log_file = fopen(path, "a");
}

void pretended_log(const char *format, ...) {
  pthread_mutex_lock(&lock);
  if (log_owner != getpid()) open_log();
  if (log_file) {
    va_list values;
    va_start(values, format);
    fprintf(log_file, "{\"thread\":%ld,", (long)syscall(SYS_gettid));
    vfprintf(log_file, format, values);
    fputs("}\n", log_file);
    fflush(log_file);
    va_end(values);
  }
  pthread_mutex_unlock(&lock);
}

void pretended_misuse(const char *format, ...) {
  char text[1000];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  pretended_count(MISUSES, 1);
  fprintf(stderr, "[pretended device, process %d] MISUSE: %s\n", (int)getpid(), text);
}

__attribute__((constructor)) static void read_settings(void) {
  const char *text;
  device_count = (int)pretended_setting("PRETENDED_DEVICES", 1);
  if (device_count > MAX_DEVICES) device_count = MAX_DEVICES;
  double gib = (text = getenv("PRETENDED_GIB")) && *text ? atof(text) : 79.11; /* what a card of 80 GB reports */
  total_bytes = (uint64_t)(gib * 1073741824.0) / MIB * MIB;
  context_bytes = pretended_setting("PRETENDED_CONTEXT_MIB", 520) * MIB;
  largest_copy = pretended_setting("PRETENDED_LARGEST_COPY", ~0ull);
  if ((text = getenv("PRETENDED_CAPABILITY"))) sscanf(text, "%d.%d", &major, &minor);
  if ((text = getenv("PRETENDED_NAME"))) snprintf(device_name, sizeof device_name, "%s", text);
}

/* Memory: a sorted table of the blocks that were given */

static Block *blocks;
static int num_blocks, room_for_blocks;

static int first_above(uint64_t address) {
  int low = 0, high = num_blocks;
  while (low < high) {
    int middle = (low + high) / 2;
    if (blocks[middle].base <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static int block_at(uint64_t address) { /* -1 if there is none */
  int index = first_above(address) - 1;
  return index >= 0 && address < blocks[index].base + (blocks[index].size ? blocks[index].size : 1) ? index : -1;
}

static void add_block(uint64_t base, size_t size, int device, int kind) {
  if (num_blocks == room_for_blocks) {
    room_for_blocks = room_for_blocks ? 2 * room_for_blocks : 256;
    blocks = realloc(blocks, (size_t)room_for_blocks * sizeof *blocks);
  }
  int index = first_above(base);
  memmove(blocks + index + 1, blocks + index, (size_t)(num_blocks - index) * sizeof *blocks);
  blocks[index] = (Block){base, size, device, kind};
  num_blocks++;
}

static void remove_block(int index) {
  memmove(blocks + index, blocks + index + 1, (size_t)(num_blocks - index - 1) * sizeof *blocks);
  num_blocks--;
}

static int take_block(const void *address, int kind, Block *taken) {
  pthread_mutex_lock(&lock);
  int index = block_at((uint64_t)address);
  int found = index >= 0 && blocks[index].base == (uint64_t)address && blocks[index].kind == kind;
  if (found) {
    *taken = blocks[index];
    remove_block(index);
  }
  pthread_mutex_unlock(&lock);
  return found;
}

int pretended_find(const void *address, Block *found) {
  pthread_mutex_lock(&lock);
  int index = block_at((uint64_t)address);
  if (index >= 0 && found) *found = blocks[index];
  pthread_mutex_unlock(&lock);
  return index >= 0;
}

int pretended_charge(int device, int64_t bytes) {
  pthread_mutex_lock(&lock);
  int full = bytes > 0 && used_bytes[device] + bytes + (int64_t)context_bytes > (int64_t)total_bytes;
  if (!full) used_bytes[device] += bytes;
  pthread_mutex_unlock(&lock);
  return full;
}

static char *map_regions(void) { /* under the lock */
  if (!regions) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    regions = mmap(NULL, REGION * (uint64_t)MAX_DEVICES, PROT_NONE, flags, -1, 0);
    if (regions == MAP_FAILED) {
      perror("[pretended device] cannot reserve address space");
      abort();
    }
    madvise(regions, REGION * (uint64_t)MAX_DEVICES, MADV_DONTDUMP);
  }
  return regions;
}

void *pretended_reserve(size_t bytes, int device) { /* the first gap of the device's region */
  bytes = (bytes + SEGMENT - 1) / SEGMENT * SEGMENT;
  pthread_mutex_lock(&lock);
  uint64_t start = (uint64_t)map_regions() + (uint64_t)device * REGION;
  uint64_t at = (start + SEGMENT) / SEGMENT * SEGMENT, end = start + REGION;
  for (int i = first_above(at - 1); i < num_blocks && blocks[i].base < end && blocks[i].base < at + bytes; i++)
    at = (blocks[i].base + blocks[i].size + SEGMENT - 1) / SEGMENT * SEGMENT;
  int fits = at + bytes <= end;
  if (fits) add_block(at, bytes, device, DEVICE_MEMORY);
  pthread_mutex_unlock(&lock);
  return fits ? (void *)at : NULL;
}

int pretended_unreserve(void *address) {
  Block block;
  if (!take_block(address, DEVICE_MEMORY, &block)) return 1;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(address, block.size, PROT_NONE, flags, -1, 0) == MAP_FAILED;
}

void *pretended_allocate(size_t bytes, int device) {
  int64_t rounded = (int64_t)((bytes + SEGMENT - 1) / SEGMENT * SEGMENT);
  pretended_touch_context(device);
  if (pretended_charge(device, rounded)) return NULL;
  void *address = pretended_reserve(bytes, device);
  if (!address || mprotect(address, (size_t)rounded, PROT_READ | PROT_WRITE)) {
    pretended_charge(device, -rounded);
    return NULL;
  }
  madvise(address, (size_t)rounded, MADV_NOHUGEPAGE);
  return address;
}

int pretended_free(void *address) {
  Block block;
  if (!pretended_find(address, &block) || pretended_unreserve(address)) return 1;
  pretended_charge(block.device, -(int64_t)block.size);
  return 0;
}

/* Devices and errors */

static cudaError_t as_last(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int pretended_device(void) { return current_device; }
void pretended_set_device(int device) { current_device = device; }
int pretended_device_count(void) { return device_count; }
int pretended_has_context(int device) { return atomic_load(&has_context[device]); }
void pretended_touch_context(int device) {
  if (!atomic_exchange(&has_context[device], 1)) pretended_log("\"op\":\"context\",\"device\":%d", device);
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = device_count;
  return device_count ? cudaSuccess : as_last(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count) return as_last(cudaErrorInvalidDevice);
  current_device = device;
  pretended_touch_context(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, (size_t)size, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return (void)peer, (void)flags, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
  pretended_touch_context(current_device);
  pthread_mutex_lock(&lock);
  *free_bytes = total_bytes - context_bytes - (uint64_t)used_bytes[current_device];
  *all_bytes = total_bytes;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  if (device < 0 || device >= device_count) return as_last(cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "%s", device_name);
  found->uuid.bytes[15] = (char)device;
  found->totalGlobalMem = total_bytes;
  found->major = major;
  found->minor = minor;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->reservedSharedMemPerBlock = 1024;
  found->totalConstMem = 65536;
  found->l2CacheSize = 52428800;
  found->memoryBusWidth = 5120;
  found->textureAlignment = 512;
  found->pciBusID = device + 1;
  found->asyncEngineCount = 3;
  found->canMapHostMemory = found->concurrentKernels = found->unifiedAddressing = 1;
  found->managedMemory = found->concurrentManagedAccess = found->streamPrioritiesSupported = 1;
  found->cooperativeLaunch = found->memoryPoolsSupported = found->hostRegisterSupported = 1;
  found->canUseHostPointerForRegisteredMem = 1;
  found->clusterLaunch = major >= 9;
  return cudaSuccess;
}

int pretended_attribute(int attribute, int device, int *value) {
  struct cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
  const struct {
    int attribute, value;
  } known[] = {
      {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
      {cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]},
      {cudaDevAttrMaxBlockDimY, p.maxThreadsDim[1]},
      {cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2]},
      {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
      {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
      {cudaDevAttrMaxGridDimZ, p.maxGridSize[2]},
      {cudaDevAttrMaxSharedMemoryPerBlock, (int)p.sharedMemPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)p.sharedMemPerBlockOptin},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)p.sharedMemPerMultiprocessor},
      {cudaDevAttrReservedSharedMemoryPerBlock, (int)p.reservedSharedMemPerBlock},
      {cudaDevAttrWarpSize, p.warpSize},
      {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
      {cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor},
      {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
      {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor},
      {cudaDevAttrComputeCapabilityMajor, p.major},
      {cudaDevAttrComputeCapabilityMinor, p.minor},
      {cudaDevAttrL2CacheSize, p.l2CacheSize},
      {cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrTextureAlignment, (int)p.textureAlignment},
      {cudaDevAttrPciBusId, p.pciBusID},
      {cudaDevAttrAsyncEngineCount, p.asyncEngineCount},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrStreamPrioritiesSupported, 1},
      {cudaDevAttrManagedMemory, 1},
      {cudaDevAttrConcurrentManagedAccess, 1},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrHostRegisterSupported, 1},
      {cudaDevAttrMemoryPoolsSupported, 1},
      {cudaDevAttrClusterLaunch, p.clusterLaunch},
  };
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == attribute) *value = known[i].value;
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  return as_last((cudaError_t)pretended_attribute((int)attribute, device, value));
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct {
  cudaError_t error;
  const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "memory is already registered"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "memory is not registered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
};
static const char *words_of(cudaError_t error, int name) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].error == error) return name ? ERRORS[i].name : ERRORS[i].text;
  return name ? "cudaErrorUnknown" : "another error of the pretended device";
}
const char *cudaGetErrorName(cudaError_t error) { return words_of(error, 1); }
const char *cudaGetErrorString(cudaError_t error) { return words_of(error, 0); }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* Streams and events */

static Stream *live_stream(void *handle) { /* NULL for a default stream, too: 0, 1 and 2 name it */
  return (uintptr_t)handle > 2 && ((Stream *)handle)->magic == LIVE_STREAM ? handle : NULL;
}
int pretended_stream_device(void *handle) {
  Stream *stream = live_stream(handle);
  return (uintptr_t)handle <= 2 ? current_device : stream ? stream->device : -1;
}
int pretended_stream_id(void *handle) {
  Stream *stream = live_stream(handle);
  return pretended_stream_device(handle) * 1000000 + (stream ? stream->id : 0);
}
static int is_wrong_stream(void *handle, const char *what, int must_be_current) {
  int device = pretended_stream_device(handle);
  if (device < 0) pretended_misuse("%s: %p is no live stream", what, handle);
  else if (must_be_current && device != current_device)
    pretended_misuse("%s: a stream of device %d while device %d is current", what, device, current_device);
  else return 0;
  return 1;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
  Stream *stream = calloc(1, sizeof *stream);
  *stream = (Stream){LIVE_STREAM, atomic_fetch_add(&next_stream, 1), current_device, priority, flags};
  pretended_touch_context(current_device);
  *made = (cudaStream_t)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *made) { return cudaStreamCreateWithPriority(made, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Stream *stream = live_stream(handle);
  if (!stream) return as_last(cudaErrorInvalidResourceHandle);
  stream->magic = 0; /* kept, so that a later use is told */
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  Stream *stream = live_stream(handle);
  *priority = stream ? stream->priority : 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return is_wrong_stream(handle, "cudaStreamQuery", 0) ? as_last(cudaErrorInvalidResourceHandle) : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (is_wrong_stream(handle, "cudaStreamSynchronize", 0)) return as_last(cudaErrorInvalidResourceHandle);
  pretended_host_wait("cudaStreamSynchronize");
  pretended_log("\"op\":\"stream_sync\",\"stream\":%d", pretended_stream_id(handle));
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
  pretended_touch_context(current_device);
  pretended_host_wait("cudaDeviceSynchronize");
  pretended_log("\"op\":\"device_sync\",\"device\":%d", current_device);
  return cudaSuccess;
}

static Event *live_event(void *handle, const char *what) {
  Event *event = handle;
  if (event && event->magic == LIVE_EVENT) return event;
  pretended_misuse("%s: %p is no live event", what, handle);
  return NULL;
}
static uint64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
  Event *event = calloc(1, sizeof *event);
  *event = (Event){LIVE_EVENT, atomic_fetch_add(&next_event, 1), current_device, 0, flags, 0};
  pretended_touch_context(current_device);
  *made = (cudaEvent_t)event;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Event *event = live_event(handle, "cudaEventDestroy");
  if (!event) return as_last(cudaErrorInvalidResourceHandle);
  event->magic = 0;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
  Event *event = live_event(handle, "cudaEventRecord");
  (void)flags;
  if (!event || is_wrong_stream(stream, "cudaEventRecord", 0)) return as_last(cudaErrorInvalidResourceHandle);
  if (event->device != pretended_stream_device(stream)) {
    pretended_misuse("cudaEventRecord: an event of device %d on a stream of device %d", event->device,
                     pretended_stream_device(stream));
    return as_last(cudaErrorInvalidResourceHandle);
  }
  event->version++;
  event->recorded_at = nanoseconds();
  pretended_log("\"op\":\"record\",\"stream\":%d,\"event\":%d,\"version\":%d", pretended_stream_id(stream), event->id,
                event->version);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return live_event(handle, "cudaEventQuery") ? cudaSuccess : as_last(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event *event = live_event(handle, "cudaEventSynchronize");
  if (!event) return as_last(cudaErrorInvalidResourceHandle);
  pretended_host_wait("cudaEventSynchronize");
  pretended_log("\"op\":\"event_sync\",\"event\":%d,\"version\":%d", event->id, event->version);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Event *first = live_event(from, "cudaEventElapsedTime"), *last = live_event(to, "cudaEventElapsedTime");
  if (!first || !last) return as_last(cudaErrorInvalidResourceHandle);
  if (!first->version || !last->version || ((first->flags | last->flags) & cudaEventDisableTiming)) {
    pretended_misuse("cudaEventElapsedTime: an event that was not recorded, or is made without timing");
    return as_last(cudaErrorInvalidResourceHandle);
  }
  *milliseconds = (float)((double)(int64_t)(last->recorded_at - first->recorded_at) / 1e6);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
  Event *event = live_event(handle, "cudaStreamWaitEvent");
  (void)flags;
  if (!event || is_wrong_stream(stream, "cudaStreamWaitEvent", 0)) return as_last(cudaErrorInvalidResourceHandle);
  pretended_log("\"op\":\"wait\",\"stream\":%d,\"event\":%d,\"version\":%d", pretended_stream_id(stream), event->id,
                event->version);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  (void)stream;
  function(data);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  (void)flags;
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

/* No graph is ever captured. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = NULL;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  static __thread enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  enum cudaStreamCaptureMode before = current;
  current = *mode;
  *mode = before;
  return cudaSuccess;
}

/* Memory */

cudaError_t cudaMalloc(void **made, size_t bytes) {
  *made = bytes ? pretended_allocate(bytes, current_device) : NULL;
  return *made || !bytes ? cudaSuccess : as_last(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *address) {
  if (!address || !pretended_free(address)) return cudaSuccess;
  pretended_misuse("cudaFree of %p, which cudaMalloc did not give", address);
  return as_last(cudaErrorInvalidValue);
}
static void add_host_block(void *address, size_t bytes, int kind) {
  pthread_mutex_lock(&lock);
  add_block((uint64_t)address, bytes, current_device, kind);
  pthread_mutex_unlock(&lock);
}
cudaError_t cudaHostAlloc(void **made, size_t bytes, unsigned flags) {
  (void)flags;
  bytes = bytes ? (bytes + 4095) / 4096 * 4096 : 4096;
  *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*made == MAP_FAILED) return as_last(cudaErrorMemoryAllocation);
  add_host_block(*made, bytes, PINNED_MEMORY);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void *address) {
  Block block;
  if (!take_block(address, PINNED_MEMORY, &block)) return as_last(cudaErrorInvalidValue);
  munmap(address, block.size);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  (void)flags;
  if (pretended_find(address, NULL)) return as_last(cudaErrorHostMemoryAlreadyRegistered);
  add_host_block(address, bytes, REGISTERED_MEMORY);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
  Block block;
  return take_block(address, REGISTERED_MEMORY, &block) ? cudaSuccess : as_last(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  static const int TYPES[] = {cudaMemoryTypeDevice, cudaMemoryTypeHost, cudaMemoryTypeHost, cudaMemoryTypeManaged};
  Block block;
  memset(found, 0, sizeof *found);
  int known = pretended_find(address, &block);
  found->type = known ? (enum cudaMemoryType)TYPES[block.kind] : cudaMemoryTypeUnregistered;
  found->device = known ? block.device : -2;
  found->devicePointer = known ? (void *)address : NULL;
  found->hostPointer = known && block.kind == DEVICE_MEMORY ? NULL : (void *)address;
  return cudaSuccess;
}

cudaError_t cudaMallocManaged(void **made, size_t bytes, unsigned flags) {
  (void)flags;
  bytes = (bytes + 4095) / 4096 * 4096;
  *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*made == MAP_FAILED) return as_last(cudaErrorMemoryAllocation);
  add_host_block(*made, bytes, MANAGED_MEMORY); /* not charged to the device */
  return cudaSuccess;
}
cudaError_t cudaMemPrefetchAsync(const void *address, size_t bytes, struct cudaMemLocation where, unsigned flags,
                                 cudaStream_t stream) {
  return (void)address, (void)bytes, (void)where, (void)flags, (void)stream, cudaSuccess;
}

static int runs_past(const void *address, size_t bytes, const Block *block, const char *what) {
  if ((uint64_t)address + bytes <= block->base + block->size) return 0;
  pretended_misuse("%s: %zu bytes at %p run past the end of their block", what, bytes, address);
  return 1;
}
static cudaError_t copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, void *stream,
                        const char *what) {
  Block target = {0, 0, 0, -1}, source = {0, 0, 0, -1};
  if (!bytes) return cudaSuccess;
  if (is_wrong_stream(stream, what, 0)) return cudaErrorInvalidResourceHandle;
  pretended_touch_context(current_device);
  int knows_target = pretended_find(to, &target), knows_source = pretended_find(from, &source);
  int to_device = target.kind == DEVICE_MEMORY, from_device = source.kind == DEVICE_MEMORY;
  int wrong = (kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
              (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)) ||
              (kind == cudaMemcpyDeviceToDevice && !(to_device && from_device));
  if (wrong) {
    pretended_misuse("%s: kind %d to %s from %s", what, kind, to_device ? "device" : "host",
                     from_device ? "device" : "host");
    return cudaErrorInvalidValue;
  }
  if ((knows_target && runs_past(to, bytes, &target, what)) || (knows_source && runs_past(from, bytes, &source, what)))
    return cudaErrorInvalidValue;
  if (to_device && !from_device) pretended_count(TO_DEVICE_BYTES, bytes);
  if (from_device && !to_device) pretended_count(TO_HOST_BYTES, bytes);
  pretended_log("\"op\":\"copy\",\"stream\":%d,\"to\":%llu,\"from\":%llu,\"bytes\":%zu,\"pinned\":%d",
                pretended_stream_id(stream), (unsigned long long)to, (unsigned long long)from, bytes,
                (to_device || target.kind >= 0) && (from_device || source.kind >= 0));
  if (bytes <= largest_copy) memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  pretended_host_wait("cudaMemcpy");
  return as_last(copy(to, from, bytes, kind, NULL, "cudaMemcpy"));
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return as_last(copy(to, from, bytes, kind, stream, "cudaMemcpyAsync"));
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  (void)to_device, (void)from_device;
  return as_last(copy(to, from, bytes, cudaMemcpyDefault, stream, "cudaMemcpyPeerAsync"));
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t row = 0; row < height && error == cudaSuccess; row++)
    error = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream,
                 "cudaMemcpy2DAsync");
  return as_last(error);
}
static void fill(char *to, int value, size_t bytes) {
  if (value || bytes < 4 * MIB) {
    if (bytes <= largest_copy) memset(to, value, bytes);
    return;
  }
  char *first = (char *)(((uint64_t)to + 4095) / 4096 * 4096), *last = (char *)(((uint64_t)to + bytes) / 4096 * 4096);
  memset(to, 0, (size_t)(first - to));
  madvise(first, (size_t)(last - first), MADV_DONTNEED); /* pages that are given back read as zeros */
  memset(last, 0, (size_t)(to + bytes - last));
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  Block block;
  if (!bytes) return cudaSuccess;
  if (is_wrong_stream(stream, "cudaMemsetAsync", 0)) return as_last(cudaErrorInvalidResourceHandle);
  if (!pretended_find(to, &block)) {
    pretended_misuse("cudaMemsetAsync: %p is no memory of a device", to);
    return as_last(cudaErrorInvalidValue);
  }
  if (runs_past(to, bytes, &block, "cudaMemsetAsync")) return as_last(cudaErrorInvalidValue);
  pretended_log("\"op\":\"memset\",\"stream\":%d,\"to\":%llu,\"bytes\":%zu", pretended_stream_id(stream),
                (unsigned long long)to, bytes);
  fill(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }

/* Kernels: registered by nobody's name, launched by nobody */

static void *modules[1];
void **__cudaRegisterFatBinary(void *code) { return (void)code, &modules[0]; }
void __cudaRegisterFatBinaryEnd(void **module) { (void)module; }
void __cudaUnregisterFatBinary(void **module) { (void)module; }
char __cudaInitModule(void **module) { return (void)module, 1; }
void __cudaRegisterFunction(void **module, const char *host, char *device, const char *name, int limit, void *thread,
                            void *block, void *block_dim, void *grid_dim, int *warp) {
  (void)module, (void)host, (void)device, (void)name, (void)limit, (void)thread, (void)block, (void)block_dim,
      (void)grid_dim, (void)warp;
}

typedef struct {
  const void *variable;
  size_t bytes;
  void *on[MAX_DEVICES];
} Variable;
static Variable *variables;
static int num_variables;
void __cudaRegisterVar(void **module, char *variable, char *address, const char *name, int external, size_t bytes,
                       int constant, int global) {
  (void)module, (void)address, (void)name, (void)external, (void)constant, (void)global;
  pthread_mutex_lock(&lock);
  variables = realloc(variables, (size_t)(num_variables + 1) * sizeof *variables);
  memset(&variables[num_variables], 0, sizeof *variables);
  variables[num_variables].variable = variable;
  variables[num_variables++].bytes = bytes;
  pthread_mutex_unlock(&lock);
}
cudaError_t cudaGetSymbolAddress(void **address, const void *variable) {
  for (int i = 0; i < num_variables; i++)
    if (variables[i].variable == variable) {
      void **on = &variables[i].on[current_device];
      if (!*on) *on = pretended_allocate(variables[i].bytes, current_device);
      *address = *on;
      return cudaSuccess;
    }
  return as_last(cudaErrorInvalidSymbol);
}
cudaError_t cudaMemcpyToSymbol(const void *variable, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
  void *address;
  cudaError_t error = cudaGetSymbolAddress(&address, variable);
  return error ? error : cudaMemcpy((char *)address + offset, from, bytes, kind);
}

static __thread struct {
  dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared_bytes = shared_bytes;
  configuration.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}

int pretended_launch(unsigned grid[3], unsigned block[3], size_t shared_bytes, void *stream, const char *what) {
  if (is_wrong_stream(stream, what, 1)) return cudaErrorInvalidResourceHandle;
  pretended_touch_context(current_device);
  pretended_count(LAUNCHES, 1);
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  int empty = !threads || !grid[0] || !grid[1] || !grid[2];
  if (empty || threads > 1024 || block[2] > 64 || grid[1] > 65535 || grid[2] > 65535 || shared_bytes > 232448) {
    pretended_misuse("%s: a grid of %u x %u x %u with blocks of %u x %u x %u and %zu bytes cannot be launched", what,
                     grid[0], grid[1], grid[2], block[0], block[1], block[2], shared_bytes);
    return cudaErrorInvalidConfiguration;
  }
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  unsigned in_grid[3] = {grid.x, grid.y, grid.z}, in_block[3] = {block.x, block.y, block.z};
  (void)kernel, (void)arguments;
  return as_last((cudaError_t)pretended_launch(in_grid, in_block, shared_bytes, stream, "cudaLaunchKernel"));
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  return cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared_bytes, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
  return cudaLaunchKernel(kernel, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
  (void)kernel;
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->ptxVersion = found->binaryVersion = 10 * major + minor;
  found->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
  return (void)kernel, (void)attribute, (void)value, cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                            int device) {
  return (void)kernel, (void)attribute, (void)value, (void)device, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *found, const void *kernel, int block,
                                                                   size_t shared_bytes, unsigned flags) {
  (void)kernel, (void)flags;
  int by_threads = block > 0 ? 2048 / ((block + 31) / 32 * 32) : 1;
  int by_shared = shared_bytes ? (int)(233472 / (shared_bytes + 1024)) : 32;
  *found = by_threads < by_shared ? by_threads : by_shared;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *found, const void *kernel, int block,
                                                          size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(found, kernel, block, shared_bytes, 0);
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *made, const void *code, enum cudaJitOption *options, void **values,
                                unsigned num_options, enum cudaLibraryOption *library_options, void **library_values,
                                unsigned num_library_options) {
  (void)code, (void)options, (void)values, (void)num_options, (void)library_options, (void)library_values,
      (void)num_library_options;
  *made = (cudaLibrary_t)calloc(1, 16);
  return cudaSuccess;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return free(library), cudaSuccess; }
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
  (void)library;
  *kernel = (cudaKernel_t)strdup(name);
  return cudaSuccess;
}

/* The driver's functions by name: those of our libcuda */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  static void *driver;
  char newer[200];
  (void)version, (void)flags;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY);
  snprintf(newer, sizeof newer, "%s_v2", name);
  *found = driver ? dlsym(driver, newer) : NULL;
  if (driver && !*found) *found = dlsym(driver, name);
  if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *found ? cudaSuccess : cudaErrorSymbolNotFound;
}

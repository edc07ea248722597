/* libcuda of a pretended device: contexts, virtual memory for expandable segments, and launches of loaded modules. */
#define _GNU_SOURCE
#include "cuda.h"
#include "shared.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int contexts[MAX_DEVICES];

CUresult cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = pretended_device_count(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  if (ordinal < 0 || ordinal >= pretended_device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  snprintf(name, (size_t)size, "pretended device %d", device);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) return *value = 1, CUDA_SUCCESS;
  return pretended_attribute((int)attribute, device, value) ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  *active = pretended_has_context(device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  pretended_touch_context(device);
  *context = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  int device = pretended_device();
  *context = pretended_has_context(device) ? (CUcontext)&contexts[device] : NULL;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) pretended_set_device((int)((int *)context - contexts));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error ? "error of the pretended driver" : "no error";
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *found, CUpointer_attribute attribute, CUdeviceptr address) {
  Block block;
  if (!pretended_find((void *)address, &block)) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)found = block.kind == DEVICE_MEMORY ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)found = block.device;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)found = address;
  else if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) *(unsigned long long *)found = block.base;
  else memset(found, 0, 4);
  return CUDA_SUCCESS;
}

/* Expandable segments: address space, memory without an address, and what is mapped where */

typedef struct {
  size_t bytes;
  int device, holders;
} Memory;
static struct {
  CUdeviceptr at;
  Memory *memory;
} mapped[1 << 16];
static int num_mapped;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  (void)alignment, (void)wanted, (void)flags;
  *address = (CUdeviceptr)pretended_reserve(bytes, pretended_device());
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  (void)bytes;
  return pretended_unreserve((void *)address) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *where,
                     unsigned long long flags) {
  (void)flags;
  pretended_touch_context(where->location.id);
  if (pretended_charge(where->location.id, (int64_t)bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  Memory *memory = malloc(sizeof *memory);
  *memory = (Memory){bytes, where->location.id, 1};
  *made = (CUmemGenericAllocationHandle)memory;
  return CUDA_SUCCESS;
}
static void let_go(Memory *memory) {
  if (--memory->holders) return;
  pretended_charge(memory->device, -(int64_t)memory->bytes);
  free(memory);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  pthread_mutex_lock(&lock);
  let_go((Memory *)handle);
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  (void)offset, (void)flags;
  Memory *memory = (Memory *)handle;
  pthread_mutex_lock(&lock);
  memory->holders++;
  mapped[num_mapped].at = address;
  mapped[num_mapped++].memory = memory;
  pthread_mutex_unlock(&lock);
  return mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  pthread_mutex_lock(&lock);
  for (int i = num_mapped - 1; i >= 0; i--)
    if (mapped[i].at >= address && mapped[i].at < address + bytes) {
      let_go(mapped[i].memory);
      mapped[i] = mapped[--num_mapped];
    }
  pthread_mutex_unlock(&lock);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  return (void)address, (void)bytes, (void)access, (void)count, CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *where,
                                       CUmemAllocationGranularity_flags flags) {
  return (void)where, (void)flags, *bytes = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
  Block block;
  if (!pretended_find((void *)address, &block)) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = block.base;
  if (bytes) *bytes = block.size;
  return CUDA_SUCCESS;
}

/* Modules, which hold kernels that are compiled at run time */

CUresult cuModuleLoadData(CUmodule *made, const void *code) {
  (void)code;
  *made = calloc(1, 16);
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return free(module), CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  (void)module;
  *function = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  (void)function;
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return (void)function, (void)attribute, (void)value, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *found, CUfunction function, int block, size_t bytes) {
  return (void)function, (void)bytes, *found = 2048 / (block > 64 ? block : 64), CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned bytes, CUstream stream, void **arguments, void **extra) {
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  (void)function, (void)arguments, (void)extra;
  return pretended_launch(grid, block, bytes, stream, "cuLaunchKernel") ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* A map of a tensor for the copies of capability 9.0 (grouped products): what the manual asks of it is checked. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    (void)type, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    int wrong = (uintptr_t)map % 64 || rank < 1 || rank > 5 || (uintptr_t)address % 16;
    for (cuuint32_t dim = 0; !wrong && dim < rank; dim++)
        wrong = !sizes[dim] || sizes[dim] > 1ull << 32 || !box[dim] || box[dim] > 256 || !steps[dim] || steps[dim] > 8;
    for (cuuint32_t dim = 0; !wrong && dim + 1 < rank; dim++) wrong = strides[dim] % 16 || strides[dim] >= 1ull << 40;
    if (wrong) {
        pretended_misuse("cuTensorMapEncodeTiled: a tensor of rank %u at %p", rank, address);
        return CUDA_ERROR_INVALID_VALUE;
    }
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

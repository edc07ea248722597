/* libcudnn of a pretended device: handles, and the graph API that attention goes through. */
#include "cudnn.h"
#include "shared.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
  cudaStream_t stream;
  int device;
} Handle;

cudnnStatus_t cudnnCreate(cudnnHandle_t *made) {
  Handle *handle = calloc(1, sizeof *handle);
  handle->device = pretended_device();
  *made = (cudnnHandle_t)handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return free(handle), CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  return ((Handle *)handle)->stream = stream, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
  return *stream = ((Handle *)handle)->stream, CUDNN_STATUS_SUCCESS;
}
size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t status) { return status ? "error of the pretended cuDNN" : "no error"; }
void cudnnGetLastErrorString(char *text, size_t size) {
  if (size) *text = 0;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
  return (void)type, *made = calloc(1, 64), CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) { return free(made), CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t made) { return (void)made, CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t made, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void *values) {
  return (void)made, (void)name, (void)type, (void)count, (void)values, CUDNN_STATUS_SUCCESS;
}
static size_t size_of(cudnnBackendAttributeType_t type) {
  if (type == CUDNN_TYPE_BOOLEAN || type == CUDNN_TYPE_CHAR) return 1;
  return type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_DOUBLE || type == CUDNN_TYPE_VOID_PTR ? 8 : 4;
}
/* There is one engine with one configuration; it has no notes, and needs no workspace. */
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t made, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count,
                                       void *values) {
  (void)made, (void)name;
  int is_note = type == CUDNN_TYPE_NUMERICAL_NOTE || type == CUDNN_TYPE_BEHAVIOR_NOTE;
  if (count) *count = is_note ? 0 : 1;
  if (values && wanted > 0 && !is_note && type != CUDNN_TYPE_BACKEND_DESCRIPTOR) memset(values, 0, size_of(type));
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t data) {
  int device = ((Handle *)handle)->device;
  (void)plan, (void)data;
  if (device != pretended_device())
    pretended_misuse("cudnnBackendExecute: a handle of device %d while device %d is current", device,
                     pretended_device());
  pretended_count(LAUNCHES, 1);
  return CUDNN_STATUS_SUCCESS;
}

/* libcublas and libcublasLt of a pretended device: matrix products are checked and counted, and not computed. */
#define __CUDA_FP16_H__ /* these headers ask for C++; only two names of them are needed */
#define __CUDA_BF16_H__
typedef struct {
  unsigned short bits;
} __half, __nv_bfloat16;
#include "cublasLt.h"
#include "cublas_v2.h"
#include "shared.h"
#include <stdlib.h>
#include <string.h>

static cublasStatus_t product(const char *what, const void *a, const void *b, const void *c) {
  const void *operands[] = {a, b, c};
  pretended_count(PRODUCTS, 1);
  for (int i = 0; i < 3; i++)
    if (operands[i] && !pretended_find(operands[i], NULL))
      pretended_misuse("%s: operand %d at %p is no memory of a device", what, i, operands[i]);
  return CUBLAS_STATUS_SUCCESS;
}

#ifdef LIGHT
#define DESCRIPTOR_BYTES 2048
static void *descriptor(void) { return calloc(1, DESCRIPTOR_BYTES); }

cublasStatus_t cublasLtCreate(cublasLtHandle_t *made) { return *made = descriptor(), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return free(handle), CUBLAS_STATUS_SUCCESS; }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  return (void)compute, (void)scale, *made = descriptor(), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) { return free(made), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t made, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size) {
  return (void)made, (void)attribute, (void)value, (void)size, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
  return (void)type, (void)rows, (void)columns, (void)leading, *made = descriptor(), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) { return free(made), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t made,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t size) {
  return (void)made, (void)attribute, (void)value, (void)size, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) {
  return *made = descriptor(), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  return free(made), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t made,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t size) {
  return (void)made, (void)attribute, (void)value, (void)size, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t what,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
  (void)handle, (void)what, (void)a, (void)b, (void)c, (void)d, (void)preference;
  *found = wanted > 0;
  if (wanted > 0) memset(results, 0, sizeof *results);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t what, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t of_a, const void *b, cublasLtMatrixLayout_t of_b,
                              const void *beta, const void *c, cublasLtMatrixLayout_t of_c, void *d,
                              cublasLtMatrixLayout_t of_d, const cublasLtMatmulAlgo_t *how, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  (void)handle, (void)what, (void)alpha, (void)of_a, (void)of_b, (void)beta, (void)c, (void)of_c, (void)of_d,
      (void)how, (void)workspace, (void)workspace_bytes, (void)stream;
  return product("cublasLtMatmul", a, b, d);
}
#else
typedef struct {
  cudaStream_t stream;
  cublasMath_t math;
  cublasPointerMode_t pointers;
  int device;
} Handle;

cublasStatus_t cublasCreate_v2(cublasHandle_t *made) {
  Handle *handle = calloc(1, sizeof *handle);
  handle->device = pretended_device();
  *made = (cublasHandle_t)handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { return free(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  return ((Handle *)handle)->stream = stream, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream) {
  return *stream = ((Handle *)handle)->stream, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes) {
  return (void)handle, (void)workspace, (void)bytes, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t math) {
  return ((Handle *)handle)->math = math, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *math) {
  return *math = ((Handle *)handle)->math, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t pointers) {
  return ((Handle *)handle)->pointers = pointers, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *pointers) {
  return *pointers = ((Handle *)handle)->pointers, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) {
  return (void)handle, *version = CUBLAS_VERSION, CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t with_handle(cublasHandle_t handle, const char *what, const void *a, const void *b, void *c) {
  int device = ((Handle *)handle)->device;
  if (device != pretended_device())
    pretended_misuse("%s: a handle of device %d while device %d is current", what, device, pretended_device());
  return product(what, a, b, c);
}
#define SIZES cublasOperation_t of_a, cublasOperation_t of_b, int m, int n, int k
#define IGNORED (void)of_a, (void)of_b, (void)m, (void)n, (void)k, (void)alpha, (void)beta, (void)lda, (void)ldb, (void)ldc

cublasStatus_t cublasGemmEx(cublasHandle_t handle, SIZES, const void *alpha, const void *a, cudaDataType type_a,
                            int lda, const void *b, cudaDataType type_b, int ldb, const void *beta, void *c,
                            cudaDataType type_c, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t how) {
  IGNORED, (void)type_a, (void)type_b, (void)type_c, (void)compute, (void)how;
  return with_handle(handle, "cublasGemmEx", a, b, c);
}
cublasStatus_t cublasSgemmEx(cublasHandle_t handle, SIZES, const float *alpha, const void *a, cudaDataType type_a,
                             int lda, const void *b, cudaDataType type_b, int ldb, const float *beta, void *c,
                             cudaDataType type_c, int ldc) {
  IGNORED, (void)type_a, (void)type_b, (void)type_c;
  return with_handle(handle, "cublasSgemmEx", a, b, c);
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, SIZES, const void *alpha, const void *a,
                                          cudaDataType type_a, int lda, long long stride_a, const void *b,
                                          cudaDataType type_b, int ldb, long long stride_b, const void *beta, void *c,
                                          cudaDataType type_c, int ldc, long long stride_c, int count,
                                          cublasComputeType_t compute, cublasGemmAlgo_t how) {
  IGNORED, (void)type_a, (void)type_b, (void)type_c, (void)stride_a, (void)stride_b, (void)stride_c, (void)count,
      (void)compute, (void)how;
  return with_handle(handle, "cublasGemmStridedBatchedEx", a, b, c);
}
#define PRODUCT(name, type)                                                                                            \
  cublasStatus_t name(cublasHandle_t handle, SIZES, const type *alpha, const type *a, int lda, const type *b, int ldb, \
                      const type *beta, type *c, int ldc) {                                                            \
    IGNORED;                                                                                                           \
    return with_handle(handle, #name, a, b, c);                                                                        \
  }
#define BATCHED(name, type)                                                                                            \
  cublasStatus_t name(cublasHandle_t handle, SIZES, const type *alpha, const type *a, int lda, long long stride_a,     \
                      const type *b, int ldb, long long stride_b, const type *beta, type *c, int ldc,                  \
                      long long stride_c, int count) {                                                                 \
    IGNORED, (void)stride_a, (void)stride_b, (void)stride_c, (void)count;                                              \
    return with_handle(handle, #name, a, b, c);                                                                        \
  }
PRODUCT(cublasSgemm_v2, float)
PRODUCT(cublasDgemm_v2, double)
BATCHED(cublasSgemmStridedBatched, float)
BATCHED(cublasDgemmStridedBatched, double)
#define VECTOR(name, type)                                                                                             \
  cublasStatus_t name(cublasHandle_t handle, cublasOperation_t of_a, int m, int n, const type *alpha, const type *a,   \
                      int lda, const type *x, int step_x, const type *beta, type *y, int step_y) {                     \
    (void)of_a, (void)m, (void)n, (void)alpha, (void)lda, (void)step_x, (void)beta, (void)step_y;                      \
    return with_handle(handle, #name, a, x, y);                                                                        \
  }
VECTOR(cublasSgemv_v2, float)
VECTOR(cublasDgemv_v2, double)
#define DOT(name, type)                                                                                                \
  cublasStatus_t name(cublasHandle_t handle, int n, const type *x, int step_x, const type *y, int step_y, type *found) { \
    (void)n, (void)step_x, (void)step_y;                                                                               \
    return with_handle(handle, #name, x, y, found);                                                                    \
  }
DOT(cublasSdot_v2, float)
DOT(cublasDdot_v2, double)
#endif

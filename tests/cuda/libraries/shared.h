/* What the libraries of the pretended device share; libcudart exports it. */
#ifndef SHARED_H
#define SHARED_H
#include <stddef.h>
#include <stdint.h>

#define MAX_DEVICES 16

enum { DEVICE_MEMORY, PINNED_MEMORY, REGISTERED_MEMORY, MANAGED_MEMORY };
enum { LAUNCHES, PRODUCTS, COLLECTIVES, TO_DEVICE_BYTES, TO_HOST_BYTES, HOST_WAITS, MISUSES, COUNTERS };

typedef struct {
  uint64_t base;
  size_t size;
  int device;
  int kind;
} Block;

void pretended_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
void pretended_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void pretended_count(int counter, uint64_t amount);
void pretended_host_wait(const char *what);

int pretended_device(void); /* of this thread */
void pretended_set_device(int device);
int pretended_device_count(void);
void pretended_touch_context(int device);
int pretended_has_context(int device);
int pretended_attribute(int attribute, int device, int *value);

int pretended_find(const void *address, Block *found); /* 1 if the address lies in memory that we gave */
int pretended_charge(int device, int64_t bytes);       /* 1 if the device has not as much */
void *pretended_allocate(size_t bytes, int device);    /* NULL if the device has not as much */
int pretended_free(void *address);
void *pretended_reserve(size_t bytes, int device); /* address space alone */
int pretended_unreserve(void *address);

int pretended_stream_id(void *stream);     /* device * 1000000 for a default stream */
int pretended_stream_device(void *stream); /* -1 if it is none that lives */
int pretended_launch(unsigned grid[3], unsigned block[3], size_t shared_bytes, void *stream, const char *what);

uint64_t pretended_setting(const char *name, uint64_t otherwise);
#endif

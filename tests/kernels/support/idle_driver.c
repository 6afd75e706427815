/* A CUDA driver that does nothing but write down what it was asked to launch, for tests of the launcher without a GPU.
 */
#include <stdint.h>
#include <string.h>

struct config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    const void* attributes;
    unsigned num_attributes;
};

struct launch {
    uint64_t function;
    unsigned grid_x, grid_y, block, shared_bytes, num_attributes, num_bytes;
    unsigned char params[4096];
};

static struct launch launches[64];
static int num_launches;
static unsigned params_bytes[64]; /* of the launches to come: the driver of a GPU knows them from the kernel */

void expect(int number, unsigned bytes) { params_bytes[number] = bytes; }
int count(void) { return num_launches; }
const struct launch* get(int i) { return &launches[i]; }
void clear(void) { num_launches = 0; }

int cuLaunchKernelEx(const struct config* config, void* function, void** arguments, void** extra) {
    struct launch* const launch = &launches[num_launches];
    (void)extra;
    launch->function = (uint64_t)function;
    launch->grid_x = config->grid[0];
    launch->grid_y = config->grid[1];
    launch->block = config->block[0];
    launch->shared_bytes = config->shared_bytes;
    launch->num_attributes = config->num_attributes;
    launch->num_bytes = params_bytes[num_launches];
    memcpy(launch->params, arguments[0], launch->num_bytes);
    ++num_launches;
    return 0;
}

/* The address of its tensor, and nothing else, as in idle_driver.py. */
int cuTensorMapEncodeTiled(void* map, int element, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
    (void)element, (void)rank, (void)sizes, (void)strides, (void)box, (void)steps, (void)interleave, (void)swizzle;
    (void)promotion, (void)fill;
    memset(map, 0, 128);
    memcpy(map, &address, sizeof address);
    return 0;
}

int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void* stream) {
    (void)stream;
    for (size_t i = 0; i < count; ++i) {
        ((unsigned*)address)[i] = value;
    }
    return 0;
}

static void* current_context = (void*)7;

void set_context(int context) { current_context = (void*)(intptr_t)context; }

int cuCtxGetCurrent(void** context) {
    *context = current_context;
    return 0;
}

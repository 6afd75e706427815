// Repeats calls that Python has prepared: an op of ours whose arguments have the shapes, strides and options of an
// earlier call allocates, writes addresses into parameters and launches, without Python.
//
// Built without headers of PyTorch or CUDA: the functions of PyTorch's stable C interface
// (torch/csrc/stable/c/shim.h, 2.10 and later) and of the CUDA driver are declared here and looked up in the libraries
// of the process, so that one binary runs with every version of both. What Python hands over is described in
// magi_compile/kernels/sm90/runtime/native.py.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// PyTorch

using Value = uint64_t;   // StableIValue
using Tensor = struct TensorOpaque*;
using List = struct ListOpaque*;
using Text = struct TextOpaque*;
using Library = struct LibraryOpaque*;
using Kernel = void (*)(Value* stack, uint64_t num_arguments, uint64_t num_results);

constexpr uint64_t kAbiVersion = 0x020b000000000000;   // 2.11
constexpr int32_t kCuda = 1;                           // DeviceType

struct Torch {
    int (*aoti_torch_get_dim)(Tensor, int64_t*);
    int (*aoti_torch_get_sizes)(Tensor, int64_t**);
    int (*aoti_torch_get_strides)(Tensor, int64_t**);
    int (*aoti_torch_get_dtype)(Tensor, int32_t*);
    int (*aoti_torch_get_device_type)(Tensor, int32_t*);
    int (*aoti_torch_get_device_index)(Tensor, int32_t*);
    int (*aoti_torch_get_data_ptr)(Tensor, void**);
    int (*aoti_torch_empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);
    int (*aoti_torch_delete_tensor_object)(Tensor);
    int (*aoti_torch_library_init_impl)(const char*, const char*, const char*, uint32_t, Library*);
    int (*torch_library_impl)(Library, const char*, Kernel, uint64_t);
    int (*torch_call_dispatcher)(const char*, const char*, Value*, uint64_t);
    int (*torch_list_size)(List, size_t*);
    int (*torch_list_get_item)(List, size_t, Value*);
    int (*torch_delete_list)(List);
    int (*torch_new_list_reserve_size)(size_t, List*);
    int (*torch_list_push_back)(List, Value);
    int (*torch_string_length)(Text, size_t*);
    int (*torch_string_c_str)(Text, const char**);
    int (*torch_delete_string)(Text);
    int (*torch_delete_stable_ivalue)(Value*);                    // 2.13 and later
    int (*aoti_torch_get_current_cuda_stream)(int32_t, void**);   // with CUDA
};

// The CUDA driver

struct LaunchAttribute {
    int id;
    char padding[4];
    union {
        unsigned cluster[3];
        int may_start_early, cooperative;
        char bytes[64];
    };
};

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void* stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};

static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "as in cuda.h");

constexpr int kCooperative = 2, kClusterDimension = 4, kProgrammaticStreamSerialization = 6;
constexpr int kSwizzle128B = 3, kPromotion256B = 3;

struct Driver {
    int (*cuLaunchKernelEx)(const LaunchConfig*, void*, void**, void**);
    int (*cuTensorMapEncodeTiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                  const uint32_t*, int, int, int, int);
    int (*cuMemsetD32Async)(uint64_t, unsigned, size_t, void*);
    int (*cuCtxGetCurrent)(void**);
};

Torch torch;
Driver driver;

void check(int error, const char* what) {
    if (error != 0) {
        throw std::runtime_error(std::string("magi_compile: ") + what + " failed with error " + std::to_string(error));
    }
}

// A prepared call

constexpr int kMostParamBytes = 4096;
constexpr int kTensorMapBytes = 128;

struct Buffer {
    int32_t dtype;
    int64_t zeros;
    std::vector<int64_t> sizes, strides;
};

struct Pointer {
    int64_t at, buffer, offset;
};

struct TensorMap {
    Pointer pointer;
    int element;
    uint64_t sizes[3], strides[2];
    uint32_t box[3];
    bool is_swizzled;
};

struct Launch {
    void* function;
    unsigned grid[2], num_threads, shared_bytes;
    bool may_start_early;
    unsigned cluster;
    bool is_cooperative;
    std::vector<unsigned char> params;
    std::vector<Pointer> pointers;
    std::vector<TensorMap> maps;
};

struct Given {
    int64_t argument, offset;   // where in memory of which tensor, in bytes; -1: it is not there
};

struct Call {
    int32_t device_type, device_index;
    void* context;
    std::vector<Given> given;
    std::vector<Buffer> made;       // behind them
    std::vector<int64_t> results;   // of `made`
    std::vector<Launch> launches;
};

class Reader {
public:
    Reader(const int64_t* words, const unsigned char* bytes) : words_(words), bytes_(bytes) {}

    int64_t word() { return *words_++; }

    std::vector<int64_t> words(int64_t count) {
        words_ += count;
        return {words_ - count, words_};
    }

    std::vector<unsigned char> bytes(int64_t count) {
        bytes_ += count;
        return {bytes_ - count, bytes_};
    }

    Pointer pointer() {
        const int64_t at = word(), buffer = word();
        return {at, buffer, word()};
    }

    TensorMap tensor_map() {
        TensorMap map{};
        map.pointer = pointer();
        map.element = static_cast<int>(word());
        for (uint64_t& x : map.sizes) x = word();
        for (uint64_t& x : map.strides) x = word();
        for (uint32_t& x : map.box) x = static_cast<uint32_t>(word());
        map.is_swizzled = word() != 0;
        return map;
    }

    Launch launch() {
        Launch launch{};
        launch.function = reinterpret_cast<void*>(word());
        for (unsigned& x : launch.grid) x = static_cast<unsigned>(word());
        launch.num_threads = static_cast<unsigned>(word());
        launch.shared_bytes = static_cast<unsigned>(word());
        launch.may_start_early = word() != 0;
        launch.cluster = static_cast<unsigned>(word());
        launch.is_cooperative = word() != 0;
        launch.params = bytes(word());
        launch.pointers.resize(word());
        for (Pointer& x : launch.pointers) x = pointer();
        launch.maps.resize(word());
        for (TensorMap& x : launch.maps) x = tensor_map();
        return launch;
    }

    std::shared_ptr<const Call> call() {
        auto call = std::make_shared<Call>();
        call->device_type = static_cast<int32_t>(word());
        call->device_index = static_cast<int32_t>(word());
        call->context = reinterpret_cast<void*>(word());
        call->given.resize(word());
        for (Given& x : call->given) {
            x.argument = word();
            x.offset = word();
        }
        call->made.resize(word());
        for (Buffer& x : call->made) {
            x.dtype = static_cast<int32_t>(word());
            x.zeros = word();
            const int64_t dims = word();
            x.sizes = words(dims);
            x.strides = words(dims);
        }
        call->results = words(word());
        call->launches.resize(word());
        for (Launch& x : call->launches) x = launch();
        return call;
    }

private:
    const int64_t* words_;
    const unsigned char* bytes_;
};

// Which call

using Key = std::vector<int64_t>;

struct KeyHash {
    size_t operator()(const Key& key) const {
        uint64_t hash = 0xcbf29ce484222325;
        for (int64_t word : key) {
            hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15;
            hash ^= hash >> 29;
        }
        return hash;
    }
};

constexpr size_t kMostCalls = 4096;

std::shared_mutex calls_mutex;
std::unordered_map<Key, std::shared_ptr<const Call>, KeyHash> calls;

thread_local const Key* asked = nullptr;   // what Python is about to compute for this thread
thread_local std::string error_text;

std::shared_ptr<const Call> find(const Key& key) {
    std::shared_lock lock(calls_mutex);
    const auto found = calls.find(key);
    return found == calls.end() ? nullptr : found->second;
}

// Flags that checks on a device raise in host memory; Python turns them into an exception.

struct Flags {
    const volatile int64_t* first;
    int64_t count, stride;
};

std::shared_mutex flags_mutex;
std::vector<Flags> flags;

bool has_failures() {
    std::shared_lock lock(flags_mutex);
    for (const Flags& x : flags) {
        for (int64_t i = 0; i < x.count; ++i) {
            if (x.first[i * x.stride] != 0) {
                return true;
            }
        }
    }
    return false;
}

// An op

struct Op {
    std::string name, fallback;
    std::string arguments;   // a letter each: T tensor, O optional tensor, L list of tensors, M optional list of
                             // tensors, l list of numbers, s str, n number
    std::string results;     // T for each tensor, or L: a list of them
};

constexpr int kMostOps = 6;
Op ops[kMostOps];
int num_ops = 0;

// The arguments of a call.
class Arguments {
public:
    Arguments(const Op& op, Value* stack) : op_(op), stack_(stack) {
        tensors.reserve(32);
        key.reserve(256);
        key.push_back(&op - ops);
        for (size_t i = 0; i < op.arguments.size(); ++i) {
            add(op.arguments[i], stack[i]);
        }
    }

    Arguments(const Arguments&) = delete;
    Arguments& operator=(const Arguments&) = delete;

    // They are used up, as a kernel has to leave them.
    void release() {
        for (Tensor tensor : of_lists_) {
            torch.aoti_torch_delete_tensor_object(tensor);
        }
        for (size_t i = 0; i < op_.arguments.size(); ++i) {
            switch (op_.arguments[i]) {
                case 'T': torch.aoti_torch_delete_tensor_object(reinterpret_cast<Tensor>(stack_[i])); break;
                case 'O':
                case 'M':
                    if (Value* const boxed = reinterpret_cast<Value*>(stack_[i])) {
                        if (op_.arguments[i] == 'O') {
                            torch.aoti_torch_delete_tensor_object(reinterpret_cast<Tensor>(*boxed));
                        } else {
                            torch.torch_delete_list(reinterpret_cast<List>(*boxed));
                        }
                        if (torch.torch_delete_stable_ivalue != nullptr) {
                            torch.torch_delete_stable_ivalue(boxed);
                        } else {
                            delete boxed;
                        }
                    }
                    break;
                case 'L':
                case 'l': torch.torch_delete_list(reinterpret_cast<List>(stack_[i])); break;   // not what it holds
                case 's': torch.torch_delete_string(reinterpret_cast<Text>(stack_[i])); break;
                default: break;
            }
        }
    }

    std::vector<Tensor> tensors;   // all of them, those of lists too; null where there is none
    std::vector<uint64_t> addresses;
    Key key;

private:
    void add(char letter, Value value) {
        switch (letter) {
            case 'T': add_tensor(reinterpret_cast<Tensor>(value)); break;
            case 'O': {
                const Value* const boxed = reinterpret_cast<const Value*>(value);
                add_tensor(boxed == nullptr ? nullptr : reinterpret_cast<Tensor>(*boxed));
                break;
            }
            case 'M':
                if (const Value* const boxed = reinterpret_cast<const Value*>(value)) {
                    add_list(reinterpret_cast<List>(*boxed), true);
                } else {
                    add_tensor(nullptr);
                }
                break;
            case 'L':
            case 'l': add_list(reinterpret_cast<List>(value), letter == 'L'); break;
            case 's': add_text(reinterpret_cast<Text>(value)); break;
            default: key.push_back(static_cast<int64_t>(value)); break;
        }
    }

    void add_list(List list, bool is_of_tensors) {
        size_t size = 0;
        check(torch.torch_list_size(list, &size), "torch_list_size");
        key.push_back(static_cast<int64_t>(size));
        for (size_t i = 0; i < size; ++i) {
            Value item = 0;
            check(torch.torch_list_get_item(list, i, &item), "torch_list_get_item");
            if (is_of_tensors) {
                of_lists_.push_back(reinterpret_cast<Tensor>(item));
                add_tensor(of_lists_.back());
            } else {
                key.push_back(static_cast<int64_t>(item));
            }
        }
    }

    void add_text(Text text) {
        size_t length = 0;
        const char* characters = nullptr;
        check(torch.torch_string_length(text, &length), "torch_string_length");
        check(torch.torch_string_c_str(text, &characters), "torch_string_c_str");
        key.push_back(static_cast<int64_t>(length));
        for (size_t i = 0; i < length; i += sizeof(int64_t)) {
            int64_t word = 0;
            std::memcpy(&word, characters + i, std::min(sizeof word, length - i));
            key.push_back(word);
        }
    }

    void add_tensor(Tensor tensor) {
        tensors.push_back(tensor);
        if (tensor == nullptr) {
            addresses.push_back(0);
            key.push_back(-1);
            return;
        }
        int64_t dims = 0;
        int64_t *sizes = nullptr, *strides = nullptr;
        int32_t dtype = 0, device_type = 0, device_index = 0;
        void* data = nullptr;
        check(torch.aoti_torch_get_dim(tensor, &dims), "aoti_torch_get_dim");
        check(torch.aoti_torch_get_sizes(tensor, &sizes), "aoti_torch_get_sizes");
        check(torch.aoti_torch_get_strides(tensor, &strides), "aoti_torch_get_strides");
        check(torch.aoti_torch_get_dtype(tensor, &dtype), "aoti_torch_get_dtype");
        check(torch.aoti_torch_get_device_type(tensor, &device_type), "aoti_torch_get_device_type");
        check(torch.aoti_torch_get_device_index(tensor, &device_index), "aoti_torch_get_device_index");
        check(torch.aoti_torch_get_data_ptr(tensor, &data), "aoti_torch_get_data_ptr");
        const uint64_t address = reinterpret_cast<uint64_t>(data);
        addresses.push_back(address);
        // How an address is aligned decides whether TMA can read what is there.
        key.push_back(dims | static_cast<int64_t>(dtype) << 8 | static_cast<int64_t>(device_type) << 24 |
                      static_cast<int64_t>(address % 16) << 32 | static_cast<int64_t>(device_index) << 40);
        key.insert(key.end(), sizes, sizes + dims);
        key.insert(key.end(), strides, strides + dims);
    }

    const Op& op_;
    Value* stack_;
    std::vector<Tensor> of_lists_;
};

// The tensors that a call makes.
class Made {
public:
    Made(const Call& call) : call_(call) {
        tensors_.reserve(call.made.size());
        for (const Buffer& x : call.made) {
            Tensor tensor = nullptr;
            check(torch.aoti_torch_empty_strided(static_cast<int64_t>(x.sizes.size()), x.sizes.data(), x.strides.data(),
                                                 x.dtype, call.device_type, call.device_index, &tensor),
                  "aoti_torch_empty_strided");
            tensors_.push_back(tensor);
        }
    }

    ~Made() {
        for (Tensor tensor : tensors_) {
            if (tensor != nullptr) {
                torch.aoti_torch_delete_tensor_object(tensor);
            }
        }
    }

    Made(const Made&) = delete;
    Made& operator=(const Made&) = delete;

    uint64_t address(size_t i) const {
        void* data = nullptr;
        check(torch.aoti_torch_get_data_ptr(tensors_[i], &data), "aoti_torch_get_data_ptr");
        return reinterpret_cast<uint64_t>(data);
    }

    // The results, which leave.
    void move_to(Value* stack, bool is_list) {
        List list = nullptr;
        if (is_list) {
            check(torch.torch_new_list_reserve_size(call_.results.size(), &list), "torch_new_list_reserve_size");
            stack[0] = reinterpret_cast<Value>(list);
        }
        for (size_t i = 0; i < call_.results.size(); ++i) {
            const Value tensor = reinterpret_cast<Value>(std::exchange(tensors_[call_.results[i]], nullptr));
            if (is_list) {
                check(torch.torch_list_push_back(list, tensor), "torch_list_push_back");
            } else {
                stack[i] = tensor;
            }
        }
    }

private:
    const Call& call_;
    std::vector<Tensor> tensors_;
};

void enqueue(const Launch& launch, const std::vector<uint64_t>& addresses, void* stream) {
    alignas(64) unsigned char params[kMostParamBytes];
    std::memcpy(params, launch.params.data(), launch.params.size());
    for (const Pointer& x : launch.pointers) {
        const uint64_t begin = addresses[x.buffer];
        const uint64_t address = begin == 0 ? 0 : begin + x.offset;
        std::memcpy(params + x.at, &address, sizeof address);
    }
    for (const TensorMap& x : launch.maps) {
        const uint32_t steps[3] = {1, 1, 1};
        void* const begin = reinterpret_cast<void*>(addresses[x.pointer.buffer] + x.pointer.offset);
        check(driver.cuTensorMapEncodeTiled(params + x.pointer.at, x.element, 3, begin, x.sizes, x.strides, x.box,
                                            steps, 0, x.is_swizzled ? kSwizzle128B : 0, kPromotion256B, 0),
              "cuTensorMapEncodeTiled");
    }
    LaunchAttribute attributes[3] = {};
    LaunchConfig config{
        {launch.grid[0], launch.grid[1], 1}, {launch.num_threads, 1, 1}, launch.shared_bytes, stream, attributes, 0};
    if (launch.may_start_early) {
        LaunchAttribute& attribute = attributes[config.num_attributes++];
        attribute.id = kProgrammaticStreamSerialization;
        attribute.may_start_early = 1;
    }
    if (launch.cluster > 1) {
        LaunchAttribute& attribute = attributes[config.num_attributes++];
        attribute.id = kClusterDimension;
        attribute.cluster[0] = launch.cluster;
        attribute.cluster[1] = attribute.cluster[2] = 1;
    }
    if (launch.is_cooperative) {
        LaunchAttribute& attribute = attributes[config.num_attributes++];
        attribute.id = kCooperative;
        attribute.cooperative = 1;
    }
    void* arguments[1] = {params};   // which the driver copies
    check(driver.cuLaunchKernelEx(&config, launch.function, arguments, nullptr), "cuLaunchKernelEx");
}

// Whether this thread works on the device of `call`. Where it does not, or on none yet, Python sees to that.
bool is_on_device(const Call& call) {
    void* context = nullptr;
    check(driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    return context == call.context;
}

void repeat(const Call& call, const Arguments& arguments, const Made& made) {
    void* stream = nullptr;
    if (call.device_type == kCuda && torch.aoti_torch_get_current_cuda_stream != nullptr) {
        check(torch.aoti_torch_get_current_cuda_stream(call.device_index, &stream),
              "aoti_torch_get_current_cuda_stream");
    }
    std::vector<uint64_t> addresses;
    addresses.reserve(call.given.size() + call.made.size());
    for (const Given& x : call.given) {
        const uint64_t begin = x.argument < 0 ? 0 : arguments.addresses[x.argument];
        addresses.push_back(begin == 0 ? 0 : begin + x.offset);
    }
    for (size_t i = 0; i < call.made.size(); ++i) {
        addresses.push_back(made.address(i));
        if (const int64_t zeros = call.made[i].zeros) {
            check(driver.cuMemsetD32Async(addresses.back(), 0, zeros, stream), "cuMemsetD32Async");
        }
    }
    for (const Launch& launch : call.launches) {
        enqueue(launch, addresses, stream);
    }
}

void run(const Op& op, Value* stack) {
    Arguments arguments(op, stack);
    const std::shared_ptr<const Call> call = has_failures() ? nullptr : find(arguments.key);
    if (call != nullptr && is_on_device(*call)) {
        Made made(*call);
        repeat(*call, arguments, made);
        arguments.release();
        made.move_to(stack, op.results == "L");
        return;
    }
    const Key* const outer = asked;
    asked = &arguments.key;
    error_text.clear();
    const int error = torch.torch_call_dispatcher(op.fallback.c_str(), "", stack, kAbiVersion);
    asked = outer;
    if (error != 0) {
        throw std::runtime_error(error_text.empty() ? op.name + " failed" : error_text);
    }
}

template <int kOp>
void run_op(Value* stack, uint64_t, uint64_t) {
    run(ops[kOp], stack);
}

constexpr Kernel kKernels[kMostOps] = {run_op<0>, run_op<1>, run_op<2>, run_op<3>, run_op<4>, run_op<5>};

template <class Function>
bool look_up(Function& function, const char* name, void* first, void* second) {
    void* found = first == nullptr ? nullptr : dlsym(first, name);
    if (found == nullptr && second != nullptr) {
        found = dlsym(second, name);
    }
    function = reinterpret_cast<Function>(found);
    return found != nullptr;
}

}   // namespace

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

// Looks all functions up; the name of the first one that is missing, or null. The libraries of PyTorch are loaded
// already; `driver_path` is that of the CUDA driver.
MAGI_EXPORT const char* magi_open(const char* driver_path) {
    void* const cpu = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    void* const cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
#define MAGI_LOOK_UP(name)                        \
    if (!look_up(torch.name, #name, cpu, cuda)) { \
        return #name;                             \
    }
    MAGI_LOOK_UP(aoti_torch_get_dim)
    MAGI_LOOK_UP(aoti_torch_get_sizes)
    MAGI_LOOK_UP(aoti_torch_get_strides)
    MAGI_LOOK_UP(aoti_torch_get_dtype)
    MAGI_LOOK_UP(aoti_torch_get_device_type)
    MAGI_LOOK_UP(aoti_torch_get_device_index)
    MAGI_LOOK_UP(aoti_torch_get_data_ptr)
    MAGI_LOOK_UP(aoti_torch_empty_strided)
    MAGI_LOOK_UP(aoti_torch_delete_tensor_object)
    MAGI_LOOK_UP(aoti_torch_library_init_impl)
    MAGI_LOOK_UP(torch_library_impl)
    MAGI_LOOK_UP(torch_call_dispatcher)
    MAGI_LOOK_UP(torch_list_size)
    MAGI_LOOK_UP(torch_list_get_item)
    MAGI_LOOK_UP(torch_delete_list)
    MAGI_LOOK_UP(torch_new_list_reserve_size)
    MAGI_LOOK_UP(torch_list_push_back)
    MAGI_LOOK_UP(torch_string_length)
    MAGI_LOOK_UP(torch_string_c_str)
    MAGI_LOOK_UP(torch_delete_string)
#undef MAGI_LOOK_UP
    look_up(torch.torch_delete_stable_ivalue, "torch_delete_stable_ivalue", cpu, cuda);
    look_up(torch.aoti_torch_get_current_cuda_stream, "aoti_torch_get_current_cuda_stream", cuda, cpu);
    void* const of_driver = dlopen(driver_path, RTLD_NOW);
    if (of_driver == nullptr) {
        return driver_path;
    }
#define MAGI_LOOK_UP(name)                                  \
    if (!look_up(driver.name, #name, of_driver, nullptr)) { \
        return #name;                                       \
    }
    MAGI_LOOK_UP(cuLaunchKernelEx)
    MAGI_LOOK_UP(cuTensorMapEncodeTiled)
    MAGI_LOOK_UP(cuMemsetD32Async)
    MAGI_LOOK_UP(cuCtxGetCurrent)
#undef MAGI_LOOK_UP
    return nullptr;
}

// From now on the op `magi::name` runs here where `dispatch_key` says; what is not known yet is computed by
// `magi::fallback`, an op of the same arguments. Returns 0, or an error of PyTorch.
MAGI_EXPORT int magi_register(const char* name, const char* fallback, const char* arguments, const char* results,
                              const char* dispatch_key) {
    if (num_ops == kMostOps) {
        return -1;
    }
    ops[num_ops] = {name, std::string("magi::") + fallback, arguments, results};
    Library library = nullptr;   // for ever
    int error = torch.aoti_torch_library_init_impl("magi", dispatch_key, "launcher.cpp", 0, &library);
    if (error == 0) {
        error = torch.torch_library_impl(library, name, kKernels[num_ops], kAbiVersion);
    }
    ++num_ops;
    return error;
}

// How calls like the one that this thread is computing are repeated; 0 where it computes none.
MAGI_EXPORT int magi_adopt(const int64_t* words, const unsigned char* bytes) {
    if (asked == nullptr) {
        return 0;
    }
    std::shared_ptr<const Call> call = Reader(words, bytes).call();
    for (const Launch& launch : call->launches) {
        if (launch.params.size() > kMostParamBytes) {
            return 0;
        }
    }
    std::unique_lock lock(calls_mutex);
    if (calls.size() >= kMostCalls) {
        calls.clear();
    }
    calls[*asked] = std::move(call);
    return 1;
}

// Whether this thread computes what may be adopted.
MAGI_EXPORT int magi_is_asked() { return asked != nullptr; }

// Why the call that this thread is computing failed.
MAGI_EXPORT void magi_note_error(const char* text) { error_text = text; }

// `count` flags, each `stride` int64s behind the one before: while one is not 0, calls go to Python.
MAGI_EXPORT void magi_watch(const int64_t* first, int64_t count, int64_t stride) {
    std::unique_lock lock(flags_mutex);
    flags.push_back({first, count, stride});
}

// Forgets all calls.
MAGI_EXPORT void magi_forget() {
    std::unique_lock lock(calls_mutex);
    calls.clear();
}

/* All kernel launches of a recorded pass in one call. compiled.py packs a pass and builds this file, as Triton builds its
 * own launcher. What a launch passes to CUDA's driver is what Triton's passes. */
#include "cuda.h"
#include <dlfcn.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { KERNELS = 8, VALUES = 128, MAPS = 8, TENSORS = 64, WAYS = 4 };

/* A packed pass: for each kernel a Launch, then its values, the Places of addresses among them, its Maps. */
typedef long long i64;
typedef struct { i64 function, grid[3], threads, shared, pdl, cooperative, values, places, maps; } Launch;
typedef struct { i64 value, tensor, offset; } Place; /* the value is an address: a tensor's, and bytes behind it */
typedef struct {                                     /* the value is the TMA map of what lies there */
  Place place;
  i64 type, rank, swizzle, fill, small, sizes[5], strides[5], box[5];
  i64 next, known[WAYS], encoded[WAYS][16]; /* the maps at the last addresses: memory is used over and over */
} Map;

typedef struct {
  CUtensorMap maps[MAPS];
  i64 values[VALUES];
  void *parameters[VALUES];
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config;
  CUfunction function;
} Frame;

static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*get_context)(CUcontext *), (*set_context)(CUcontext), (*retain_context)(CUcontext *, CUdevice);
static CUresult (*get_error)(CUresult, const char **), (*get_version)(int *);
static PyObject *data_ptr;
static int version;

static CUresult map_at(Map *map, i64 address, CUtensorMap *result) {
  int way = 0;
  while (way < WAYS && map->known[way] != address) way++;
  if (way == WAYS) {
    cuuint32_t box[5], steps[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < 5; i++) box[i] = (cuuint32_t)map->box[i];
    CUresult error = encode_tiled(result, map->type, map->rank, (void *)address, (cuuint64_t *)map->sizes,
                                  (cuuint64_t *)map->strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, map->fill);
    if (error) return error;
    /* A fault of drivers up to 13.1 with tensors below 128 KB, which Triton from 3.7 on and CUTLASS mend like this. */
    if (map->small && version <= 13010) ((unsigned long long *)result)[1] &= ~(1llu << 21);
    way = map->next++ % WAYS;
    map->known[way] = address;
    memcpy(map->encoded[way], result, sizeof(CUtensorMap));
  }
  memcpy(result, map->encoded[way], sizeof(CUtensorMap));
  return CUDA_SUCCESS;
}

static char *fill(Frame *frame, char *at, const i64 *addresses, CUstream stream, CUresult *error) {
  Launch *launch = (Launch *)at;
  i64 *values = (i64 *)(launch + 1);
  Place *places = (Place *)(values + launch->values);
  Map *maps = (Map *)(places + launch->places);
  memcpy(frame->values, values, launch->values * sizeof(i64));
  for (int i = 0; i < launch->values; i++) frame->parameters[i] = &frame->values[i];
  for (int i = 0; i < launch->places; i++)
    frame->values[places[i].value] = addresses[places[i].tensor] + places[i].offset;
  for (int i = 0; i < launch->maps && !*error; i++) {
    Place place = maps[i].place;
    *error = map_at(&maps[i], addresses[place.tensor] + place.offset, &frame->maps[i]);
    frame->parameters[place.value] = &frame->maps[i];
  }
  int count = 0;
  if (launch->pdl) {
    frame->attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    frame->attributes[count++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (launch->cooperative) {
    frame->attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    frame->attributes[count++].value.cooperative = 1;
  }
  frame->function = (CUfunction)launch->function;
  frame->config = (CUlaunchConfig){
      .gridDimX = launch->grid[0], .gridDimY = launch->grid[1], .gridDimZ = launch->grid[2],
      .blockDimX = launch->threads, .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = launch->shared,
      .hStream = stream, .attrs = frame->attributes, .numAttrs = count};
  return (char *)(maps + launch->maps);
}

/* launch(pass: bytearray, device: int, stream: int, tensors: list or tuple, empty: function, its arguments for each
 * tensor to allocate: tuple of tuples, results: int) -> the first `results` of the allocated tensors */
static PyObject *launch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  Frame frames[KERNELS];
  i64 addresses[TENSORS];
  char *at = PyByteArray_AS_STRING(given[0]), *end = at + PyByteArray_GET_SIZE(given[0]);
  CUstream stream = (CUstream)PyLong_AsVoidPtr(given[2]);
  Py_ssize_t inputs = PySequence_Fast_GET_SIZE(given[3]), all = inputs + PyTuple_GET_SIZE(given[5]);
  if (all > TENSORS) return PyErr_Format(PyExc_ValueError, "more than %d tensors", TENSORS);
  PyObject *made = PyTuple_New(all - inputs), *results = NULL;
  for (Py_ssize_t i = 0; made && i < all; i++) {
    PyObject *x = i < inputs ? PySequence_Fast_GET_ITEM(given[3], i)
                             : PyObject_Call(given[4], PyTuple_GET_ITEM(given[5], i - inputs), NULL);
    if (i >= inputs) PyTuple_SET_ITEM(made, i - inputs, x);
    PyObject *address = x ? PyObject_CallMethodNoArgs(x, data_ptr) : NULL;
    if (!address) goto end;
    addresses[i] = (i64)PyLong_AsVoidPtr(address);
    Py_DECREF(address);
  }
  /* A thread that has not used CUDA yet, such as autograd's, has no context. */
  CUcontext context = NULL;
  CUresult error = get_context(&context);
  if (!error && !context && !(error = retain_context(&context, (CUdevice)PyLong_AsLong(given[1]))))
    error = set_context(context);
  int kernels = 0;
  while (!error && at < end) at = fill(&frames[kernels++], at, addresses, stream, &error);
  if (!error) {
    Py_BEGIN_ALLOW_THREADS; /* a full queue is waited for */
    for (int i = 0; i < kernels && !error; i++)
      error = launch_kernel(&frames[i].config, frames[i].function, frames[i].parameters, NULL);
    Py_END_ALLOW_THREADS;
  }
  if (error) {
    const char *text = "unknown error";
    get_error(error, &text);
    PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text);
  } else if (made) {
    results = PyTuple_GetSlice(made, 0, PyLong_AsSsize_t(given[6]));
  }
end:
  Py_XDECREF(made);
  return results;
}

static PyMethodDef methods[] = {{"launch", (PyCFunction)(void *)launch, METH_FASTCALL, NULL}, {NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "flashtrain_launcher", NULL, -1, methods};

PyMODINIT_FUNC PyInit_flashtrain_launcher(void) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (!library || !(launch_kernel = dlsym(library, "cuLaunchKernelEx")) ||
      !(encode_tiled = dlsym(library, "cuTensorMapEncodeTiled")) ||
      !(get_context = dlsym(library, "cuCtxGetCurrent")) || !(set_context = dlsym(library, "cuCtxSetCurrent")) ||
      !(retain_context = dlsym(library, "cuDevicePrimaryCtxRetain")) ||
      !(get_error = dlsym(library, "cuGetErrorString")) || !(get_version = dlsym(library, "cuDriverGetVersion")) ||
      get_version(&version)) {
    PyErr_SetString(PyExc_ImportError, "libcuda.so.1 lacks a function");
    return NULL;
  }
  data_ptr = PyUnicode_InternFromString("data_ptr");
  return PyModule_Create(&definition);
}

// The host's side, for ctypes: memory, launches and times. Every function returns a CUDA error code, 0 for none.
// Knows kernels by their place in `kernels`, which the generated text in front of this file defines.

static const float4* as_words(const void* p) { return static_cast<const float4*>(p); }

__global__ void copy_words(const float4* from, float4* to, unsigned long long count) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = from[i];
  }
}

struct Shape {
  unsigned grid[3], block[3];
};

static cudaError_t launch(int kernel, const Shape* shape, void** arguments, cudaStream_t stream) {
  const dim3 grid(shape->grid[0], shape->grid[1], shape->grid[2]), block(shape->block[0], shape->block[1], shape->block[2]);
  return cudaLaunchKernel(kernels[kernel], grid, block, arguments, 0, stream);
}

static cudaError_t copy(void** arguments, size_t bytes, cudaStream_t stream) {
  copy_words<<<(unsigned)((bytes / 16 + 1023) / 1024), 256, 0, stream>>>(
      as_words(arguments[0]), static_cast<float4*>(arguments[1]), bytes / 16);
  return cudaGetLastError();
}

extern "C" {

const char* gpu_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// name has room for 256 characters; numbers: major, minor, multiprocessors, L2 bytes, driver version.
int gpu_device(char* name, int* numbers) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    return error != cudaSuccess ? error : cudaErrorNoDevice;
  }
  cudaDeviceProp found;
  error = cudaGetDeviceProperties(&found, 0);
  if (error != cudaSuccess) {
    return error;
  }
  for (int i = 0; i < 256; ++i) {
    name[i] = found.name[i];
  }
  numbers[0] = found.major, numbers[1] = found.minor, numbers[2] = found.multiProcessorCount, numbers[3] = found.l2CacheSize;
  return cudaDriverGetVersion(numbers + 4);
}

int gpu_allocate(void** place, size_t bytes) { return cudaMalloc(place, bytes); }

int gpu_free(void* place) { return cudaFree(place); }

int gpu_fill(void* place, int value, size_t bytes) { return cudaMemset(place, value, bytes); }

int gpu_write(void* place, const void* from, size_t bytes) { return cudaMemcpy(place, from, bytes, cudaMemcpyHostToDevice); }

int gpu_read(void* to, const void* place, size_t bytes) { return cudaMemcpy(to, place, bytes, cudaMemcpyDeviceToHost); }

int gpu_run(int kernel, const Shape* shape, void** arguments) {
  const cudaError_t error = launch(kernel, shape, arguments, 0);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}

// Milliseconds of `rounds` runs of one graph in which each of `num_sets` sets of arguments is launched once, in order. With kernel -1 a
// set is (from, to) and `bytes` are copied by a kernel, with -2 by the driver.
int gpu_time(int kernel, const Shape* shape, void*** sets, int num_sets, size_t bytes, int rounds, float* milliseconds) {
  cudaStream_t stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cudaEvent_t begin, end;
  cudaError_t error = cudaStreamCreate(&stream);
  if (error != cudaSuccess) {
    return error;
  }
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  for (int i = 0; i < num_sets && error == cudaSuccess; ++i) {
    if (kernel >= 0) {
      error = launch(kernel, shape, sets[i], stream);
    } else if (kernel == -1) {
      error = copy(sets[i], bytes, stream);
    } else {
      error = cudaMemcpyAsync(sets[i][1], sets[i][0], bytes, cudaMemcpyDeviceToDevice, stream);
    }
  }
  const cudaError_t closed = cudaStreamEndCapture(stream, &graph);
  error = error != cudaSuccess ? error : closed;
  if (error == cudaSuccess) {
    error = cudaGraphInstantiate(&ready, graph, 0);
  }
  for (int i = -3; i < rounds && error == cudaSuccess; ++i) {  // three runs to warm up
    cudaEventRecord(begin, stream);
    error = cudaGraphLaunch(ready, stream);
    cudaEventRecord(end, stream);
    const cudaError_t waited = cudaEventSynchronize(end);
    error = error != cudaSuccess ? error : waited;
    if (i >= 0 && error == cudaSuccess) {
      error = cudaEventElapsedTime(milliseconds + i, begin, end);
    }
  }
  if (ready) {
    cudaGraphExecDestroy(ready);
  }
  if (graph) {
    cudaGraphDestroy(graph);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return error;
}

}  // extern "C"

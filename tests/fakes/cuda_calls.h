/* cuda_calls.h - what cuda_library.py calls of NVRTC and of CUDA's driver, behind their signatures, for the tests where
 * neither is. To compile notes what for, and gives out a name; to launch calls the function of that name, in turn.
 */
#include <dlfcn.h>

#include <string>

extern "C" {

enum { SUCCESS, COMPILATION = 6, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

struct Program {
    std::string source, kernel, options, log, lowered;
};

int programs_alive;
char last_options[1024];
void *last_stream;

const char *nvrtcGetErrorString(int code)
{
    return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "another";
}

int nvrtcCreateProgram(Program **program, const char *source, const char *, int headers, const char *const *,
                       const char *const *)
{
    if (headers)
        return INVALID_VALUE;
    *program = new Program{source, "", "", "", ""};
    programs_alive++;
    return SUCCESS;
}

int nvrtcAddNameExpression(Program *program, const char *kernel)
{
    program->kernel = kernel;
    return SUCCESS;
}

int nvrtcCompileProgram(Program *program, int count, const char *const *options)
{
    for (int i = 0; i < count; i++)
        program->options += std::string(options[i]) + " ";
    std::strncpy(last_options, program->options.c_str(), sizeof last_options - 1);
    std::string name = program->kernel.substr(0, program->kernel.find('<'));
    if (program->source.find(" " + name + "(") == std::string::npos) {
        program->log = "identifier \"" + name + "\" is undefined";
        return COMPILATION;
    }
    for (char c : program->kernel)
        program->lowered += std::isalnum((unsigned char)c) ? c : '_';
    return SUCCESS;
}

int nvrtcGetProgramLogSize(Program *program, size_t *size)
{
    *size = program->log.size() + 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(Program *program, char *log)
{
    std::memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

/* Machine code has zeros in it. */
int nvrtcGetCUBINSize(Program *, size_t *size)
{
    *size = 8;
    return SUCCESS;
}

int nvrtcGetCUBIN(Program *, char *image)
{
    std::memcpy(image, "ELF\0code", 8);
    return SUCCESS;
}

int nvrtcGetLoweredName(Program *program, const char *kernel, const char **name)
{
    if (program->kernel != kernel)
        return INVALID_VALUE;
    *name = program->lowered.c_str();
    return SUCCESS;
}

int nvrtcDestroyProgram(Program **program)
{
    delete *program;
    *program = nullptr;
    programs_alive--;
    return SUCCESS;
}

static thread_local void *context;

int cuDeviceGet(int *device, int ordinal)
{
    *device = 100 + ordinal;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **found, int device)
{
    *found = (char *)nullptr + (((size_t)device << 32) + 1); /* more than an int holds */
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void *pushed)
{
    if (context || (size_t)pushed >> 32 < 100)
        return INVALID_CONTEXT;
    context = pushed;
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **popped)
{
    *popped = context;
    context = nullptr;
    return SUCCESS;
}

int cuModuleLoadData(void **module, const void *image)
{
    if (!context || std::memcmp(image, "ELF\0code", 8))
        return INVALID_VALUE;
    Dl_info here;
    dladdr((void *)&cuModuleLoadData, &here);
    *module = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return SUCCESS;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = dlsym(module, name);
    return *function ? SUCCESS : NOT_FOUND;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra)
{
    if (!context)
        return INVALID_CONTEXT;
    if (!x || y != 1 || z != 1 || threads_x != THREADS || threads_y != 1 || threads_z != 1 || shared || extra)
        return INVALID_VALUE;
    last_stream = stream;
    ((void (*)(unsigned, void **))function)(x, arguments);
    return SUCCESS;
}

int cuGetErrorString(int code, const char **text)
{
    *text = code == INVALID_CONTEXT ? "invalid device context"
            : code == NOT_FOUND     ? "named symbol not found"
                                    : nullptr;
    return SUCCESS;
}
}

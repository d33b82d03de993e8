// A libamdhip64 and libhiprtc for tests of the loader, on a machine without a GPU: modules are checked for being gfx950 code
// objects, and a launch runs the emulator's kernel of that name on the very bytes that HIP would copy to the device.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Function { char name[64]; };
static int calls;

extern "C" {

const char* hipGetErrorString(int code) { return code == 200 ? "device kernel image is invalid" : "launch failure"; }
const char* hiprtcGetErrorString(int) { return "HIPRTC_ERROR_COMPILATION"; }

int hipModuleLoadData(void** module, const void* image) {
  const unsigned char* elf = (const unsigned char*)image;
  if (getenv("FAKE_HIP_REFUSES") || memcmp(elf, "\177ELF", 4) || elf[18] != 224 || elf[48] != 0x4f) return 200;
  *module = (void*)image;
  return 0;
}
int hipModuleGetFunction(void** function, void* module, const char* name) {
  if (!module) return 201;
  Function* f = (Function*)malloc(sizeof(Function));
  snprintf(f->name, sizeof f->name, "%s", name);
  *function = f;
  return 0;
}
int hipModuleLaunchKernel(Function* f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                          unsigned shared, void* stream, void** params, void** extra) {
  if (y != 1 || z != 1 || ty != 1 || tz != 1 || shared || params || (long)stream != 77) return 202;
  if (extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4] != (void*)3 || *(size_t*)extra[3] % 8) return 203;
  const char* unit = strncmp(f->name, "attention", 9) ? "quantize" : "attention";
  if (threads != (strncmp(f->name, "query", 5) && strncmp(f->name, "key", 3) ? 512u : 256u)) return 204;
  char path[512];
  snprintf(path, sizeof path, "%s/%s.so", getenv("FAKE_HIP_KERNELS"), unit);
  int (*kernel)(const void*, unsigned, void*) = (int (*)(const void*, unsigned, void*))dlsym(dlopen(path, RTLD_NOW), f->name);
  struct { char message[240]; void* observed; long long capacity; } report = {};
  char copy[512];
  memcpy(copy, extra[1], *(size_t*)extra[3]);
  calls++;
  return kernel ? kernel(copy, x, &report) : 205;
}
int fake_calls() { return calls; }

static char log_text[4096];
int hiprtcCreateProgram(void** program, const char* source, const char* name, int headers, const char** texts, const char** names) {
  bool found = strstr(source, "LB_KERNEL") || strstr(source, "attend<");
  for (int i = 0; i < headers; i++) found = found && strlen(texts[i]) > 100 && strstr(names[i], ".h");
  *program = strdup(name);
  return !found;
}
int hiprtcCompileProgram(void* program, int count, const char** options) {
  log_text[0] = 0;
  bool architecture = false;
  for (int i = 0; i < count; i++) {
    architecture |= !strcmp(options[i], "--offload-arch=gfx950:sramecc+:xnack-");
    strcat(strcat(log_text, options[i]), " ");
  }
  return !architecture;
}
int hiprtcGetProgramLogSize(void*, size_t* size) { *size = strlen(log_text) + 1; return 0; }
int hiprtcGetProgramLog(void*, char* text) { strcpy(text, log_text); return 0; }
int hiprtcGetCodeSize(void*, size_t* size) { *size = 64; return 0; }
int hiprtcGetCode(void*, char* code) {
  memset(code, 0, 64);
  memcpy(code, "\177ELF", 4);
  code[18] = (char)224, code[48] = 0x4f;
  unsetenv("FAKE_HIP_REFUSES");
  return 0;
}
int hiprtcDestroyProgram(void** program) { free(*program); return 0; }

}

// A library that calls itself NCCL and has little of it.
extern "C" {
int ncclGetVersion(int* version);
const char* ncclGetErrorString(int result);

int ncclGetVersion(int* version) {
  *version = FAKE_VERSION;
  return FAKE_RESULT;
}
const char* ncclGetErrorString(int result) { return result == 0 ? "no error" : "an error"; }
}

// Soft capping of logits (Gemma 2).
#include "linear_kernels.h"
#include "vmath.h"

namespace hr {
namespace HR_LEVEL {

void softcap(float *x, int32_t n, float cap) {
  const F limit = set(cap), inverse = set(1.0f / cap);
  int32_t i = 0;
  for (; i + W <= n; i += W) store(x + i, limit * tanh(load(x + i) * inverse));
  if (i < n) store_part(x + i, limit * tanh(load_part(x + i, n - i) * inverse), n - i);
}

}  // namespace HR_LEVEL
}  // namespace hr

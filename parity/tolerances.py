"""Every limit of the suite, with its derivation; no test holds a number of its own.

float64 judges what the code means. Two honest writings differ by the order of their sums: 1e-15 to 5e-14 was seen, growing with
depth and with the sharpness of attention. The weakest planted fault that changes a gradient at all changes it by 1.5e-6.
The limits stand in between, at least 1,000 above the first and 10,000 below the second.

float32 judges what users of float32 get. Seen: 1e-6 forward, 5e-6 in the worst gradient; project limit 1e-5 (design.md, parity.md).

bfloat16 has no fixed limit, since an honest implementation is off by 0.5 to 5 % and a fixed number either fails it or passes faults.
Its error against the float64 truth must not exceed a multiple of the error that the plain reference code makes on the same
input in the same precision. Multiples, from the spread of the ratio of two honest implementations over all tensors
(parity study: 95 % below 1.5 in the L2 norm, worst 2.1; worst 2.6 in the max norm): 2.5 in the L2 norm, 4 in the max norm.
Floors keep tensors that the reference happens to get exactly right from demanding the impossible: rounding the truth
itself costs up to half an ulp of each element.
"""

import numpy as np

from pi05.compare import Check, max_error, relative_error, relative_l2_error, ulp

F64_LIMITS = {"L1": 1e-11, "L2": 1e-11, "L3": 1e-10, "L6": 1e-10, "L10": 1e-10}
F32_LIMIT = 1e-5
L2_MULTIPLE, MAX_MULTIPLE = 2.5, 4.0

# A gradient that is zero because softmax ignores a shift of its logits is rounding noise. In units of the layer's largest
# bias gradient (query or value bias), noise of n = 100 terms is sqrt(n) ulp; a real gradient would be of order one.
SHIFT_INVARIANT_LIMITS = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 0.5}

# Unit operations on inputs chosen to show one fault; float32 rounding of a handful of operations, against the f64 formula.
UNIT_LIMITS = {"float64": 1e-13, "float32": 2e-6}
# Of a rotated vector beyond position 512: cosines from an exact table are off by half an ulp each, products by another.
# (In float64 two ways of writing the frequency differ by 1e-13 at 1000 rad.) Frequencies in float32 would give 3e-5, in bfloat16 more than 1.
ROTARY_LIMITS = {"float64": 1e-12, "float32": 5e-7}
# Of the time embedding: angles are exact to 2 ulp of one turn (1.5e-6 rad); a plain float32 product is off by 1e-4.
TIME_LIMITS = {"float64": 1e-12, "float32": 2e-6}
# Of augmented images, absolute in [-1, 1]. A place in an image of 48 pixels is three float32 roundings, 6e-6 of a pixel; across the steepest
# edge there is (noise), after contrast and brightness, that is up to 4e-5 (seen: 1.4e-5). The promise is 2/255 of [0, 1], which is 1.6e-2 here.
AUGMENT_LIMITS = {"float64": 1e-12, "float32": 4e-5}
# augmax computes in float32 itself.
AUGMAX_LIMIT = 4e-5
# Of weights, moments and average after up to 100 updates, in units of the tensor's largest value: each update rounds a few times,
# at 6e-8. The faults this level is for change them by 1e-4 and more.
OPTIMIZER_LIMIT = 1e-6
# With a decay that float32 sees, torch rounds the weight twice an update (decay, then step): 1.2e-6 was seen after 100.
DECAY_LIMIT = 2e-6
# Of weights in units of the learning rate and of moments in units of their largest value after three whole steps: gradients agree
# to 1e-5 (level 3), AdamW divides them by their own size, and a few steps add up. A fault in what learns is of order one.
STEPS_LIMIT = 1e-3
# Of the loss of each step of a run, relative to it: the project's promise (issue 4). Seen: 2e-7 in the first ten steps, 4e-7 in the last ten of 30.
TRAJECTORY_LIMIT = 1e-3


def judge(level: str, name: str, got: np.ndarray, truth: np.ndarray, dtype: str, naive: np.ndarray | None = None) -> Check:
    """Compares one tensor with the float64 truth under the rule of `dtype`; bfloat16 needs the naive implementation's tensor."""
    if got.dtype.kind in "bi":
        return Check(name, max_error(got, truth), 0.0)
    if dtype == "float64":
        return Check(name, relative_error(got, truth), F64_LIMITS[level])
    if dtype == "float32":
        return Check(name, relative_error(got, truth), F32_LIMIT)
    half_ulp = ulp(dtype) / 2
    whole = Check(f"{name} (L2)", relative_l2_error(got, truth), max(L2_MULTIPLE * relative_l2_error(naive, truth), half_ulp))
    worst = Check(f"{name} (max)", relative_error(got, truth), max(MAX_MULTIPLE * relative_error(naive, truth), 2 * half_ulp))
    return max(whole, worst, key=lambda check: check.margin)

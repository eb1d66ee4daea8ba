"""The arithmetic that the Triton kernels of all recipes share."""

# No `from __future__ import annotations`: Triton reads them.

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _magnitude(value):
    """As an integer: the order is that of the floats, and a NaN is the largest."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(largest, MAX: tl.constexpr = 448.0, SMALLEST: tl.constexpr = 2.0**-126):
    """Scale that maps a magnitude to ``MAX``."""
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), MAX)
    return tl.where(largest < _INFINITY, tl.maximum(scale, SMALLEST), float("nan"))  # Inf and NaN are not below


@triton.jit
def _divided(x, scale, HARDWARE: tl.constexpr):
    """``x / scale``, rounded as IEEE says, for quotients within the range of float8.

    IEEE's division costs as much as all the rest of a cast. The correctly rounded reciprocal of the
    scale and two corrections by the exact remainder give the same bits (Markstein, "Computation of
    elementary functions on the IBM RISC System/6000 processor", 1990), if the remainder is a normal
    number: hence the shift.
    """
    if HARDWARE:
        shift = tl.where(scale < 2.0**-64, 2.0**64, 1.0)
        x = x * shift
        reciprocal = tl.div_rn(1.0, scale * shift)  # correctly rounded
        negative = -scale * shift
        first = x * reciprocal
        second = tl.fma(tl.fma(first, negative, x), reciprocal, first)  # the inner fma is the exact remainder
        third = tl.fma(tl.fma(second, negative, x), reciprocal, second)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000  # else every zero would be positive
        return (_magnitude(third) | sign).to(tl.float32, bitcast=True)
    return tl.div_rn(x, scale)


@triton.jit
def _to_float8(value, E5M2: tl.constexpr, HARDWARE: tl.constexpr, HAS_NAN: tl.constexpr = True):
    """float32 to the bits of float8: nearest, ties to even, saturating; every NaN is 0x7F."""
    if HARDWARE:  # which saturates
        code = value.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        element_max: tl.constexpr = 57344.0 if E5M2 else 448.0
        clamped = tl.minimum(tl.maximum(value, -element_max), element_max)
        dropped: tl.constexpr = 21 if E5M2 else 20  # bits of the mantissa
        smallest_normal: tl.constexpr = 2.0**-14 if E5M2 else 2.0**-6
        # The sum with it ends in the smallest denormal.
        denormal: tl.constexpr = 2.0**7 if E5M2 else 2.0**14
        denormal_bits: tl.constexpr = (127 + (7 if E5M2 else 14)) << 23
        bias: tl.constexpr = (127 - (15 if E5M2 else 7)) << 23
        bits = _magnitude(clamped)
        magnitude = bits.to(tl.float32, bitcast=True)
        half: tl.constexpr = (1 << (dropped - 1)) - 1
        normal = (bits - bias + half + ((bits >> dropped) & 1)) >> dropped  # the last bit that stays makes ties even
        small = (magnitude + denormal).to(tl.int32, bitcast=True) - denormal_bits  # the sum rounds
        sign = (clamped.to(tl.int32, bitcast=True) >> 24) & 0x80  # bit 31 to bit 7
        code = (tl.where(magnitude < smallest_normal, small, normal) | sign).to(tl.uint8)
    if HAS_NAN:
        code = tl.where(value == value, code, 0x7F).to(tl.uint8)
    return code


@triton.jit
def _from_e4m3(code, HARDWARE: tl.constexpr):
    """The bits of e4m3 to float32, exact."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.int32)  # as the bits of a float32 whose exponent is 120 too small
    value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _e8m0_of(largest, CEIL: tl.constexpr):
    """The power of two, in e8m0, that brings a magnitude into the range of e4m3."""
    exponent = (largest >> 23) - 8  # 448 is 1.75 * 2**8
    if CEIL:
        exponent += ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)  # a mantissa beyond 1.75
    return tl.where(largest < _INFINITY, tl.maximum(exponent, 0), 0xFF)  # 0 is 2^-127, 0xFF NaN


@triton.jit
def _reciprocal_of_e8m0(code):
    return tl.where(code == 0xFF, float("nan"), ((254 - code) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _from_e8m0(code):
    power = tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)  # 2^-127 is denormal
    return tl.where(code == 0xFF, float("nan"), power)


@triton.jit
def _to_e2m1(value):
    """float32 to 4-bit codes; a NaN becomes 0."""
    magnitude = tl.abs(value)
    # A tie goes to the even code: down at .25, 1.25, 2.5 and 5, up at .75, 1.75 and 3.5.
    code = (magnitude > 0.25).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude > 5.0).to(tl.int32)
    code += (magnitude >= 0.75).to(tl.int32) + (magnitude >= 1.75).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code |= (value.to(tl.int32, bitcast=True) >> 28) & 8  # bit 31 to bit 3
    return tl.where(value == value, code, 0)


@triton.jit
def _to_e2m1_stochastic(value, bits):
    """float32 to 4-bit codes, rounded up where 16 random bits are below the fraction of the step; a
    NaN becomes 0."""
    magnitude = tl.minimum(tl.abs(value), 6.0)
    is_small = magnitude < 2.0
    is_middle = magnitude < 4.0
    # Steps are 0.5 below 2, 1 below 4, and 2 up to 6.
    in_steps = magnitude * tl.where(is_small, 2.0, tl.where(is_middle, 1.0, 0.5))
    below = tl.floor(in_steps)
    code = below.to(tl.int32) + tl.where(is_small, 0, tl.where(is_middle, 2, 4))  # the codes of 2 and 4 are 4 and 6
    code += (bits.to(tl.float32) < (in_steps - below) * 65536.0).to(tl.int32)
    code |= (value.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(value == value, code, 0)


@triton.jit
def _from_e2m1(code):
    """4-bit codes in int32 to float32."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    # Exponents are biased by 1, in float32 by 127. With exponent 0 there are 0 and 0.5.
    bits = tl.where(exponent == 0, mantissa * 0x3F000000, ((exponent + 126) << 23) | (mantissa << 22))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)

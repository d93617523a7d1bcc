"""The kernels of this package, as PTX that the driver compiles for the device at hand: no compiler is needed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from graphreplay_cuda import driver, features

CAPACITIES = (4, 16, 64, 128)
"""How many tensors the stage kernels copy in one launch, one kernel for each: the driver takes longer for a larger
table. The largest has 3 KiB of the 4 KiB that kernel parameters may have on every device."""

OUTPUT_CAPACITIES = (0, 4, 16, 64)
"""How many tensors a graph hands out by itself; their addresses have room beside the largest table of inputs."""

THREADS = 256
"""Threads in a block of the kernels that copy."""

# set_predicate(handle, predicate): the conditional node of the handle runs if the byte at predicate is not 0.
# cudaGraphSetConditional is a builtin of the device runtime that the driver links by itself.
_SET_PREDICATE = b"""
.version 8.0
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);

.visible .entry set_predicate(.param .u64 handle, .param .u64 predicate)
{
    .reg .pred %holds;
    .reg .b16 %byte;
    .reg .b32 %value;
    .reg .b64 %handle, %address;

    ld.param.u64 %handle, [handle];
    ld.param.u64 %address, [predicate];
    cvta.to.global.u64 %address, %address;
    ld.global.u8 %byte, [%address];
    setp.ne.u16 %holds, %byte, 0;
    selp.u32 %value, 1, 0, %holds;
    {
        .param .b64 to;
        .param .b32 what;
        st.param.b64 [to], %handle;
        st.param.b32 [what], %value;
        call.uni cudaGraphSetConditional, (to, what);
    }
    ret;
}
\0"""

# One way to copy at each alignment that destination and source share: the PTX type, and one register per part.
_UNITS = {
    16: ("v4.u32", "{%w0, %w1, %w2, %w3}"),
    8: ("u64", "%x"),
    4: ("u32", "%w0"),
    2: ("u16", "%h"),
}

_COPY_UNITS = """
    // {size}-byte units, if both addresses are multiples of {size}
    and.b64 %t, %both, {size_minus_1};
    setp.ne.u64 %p, %t, 0;
    @%p bra NOT_{size};
    shr.u64 %units, %size, {log2};
    mov.u64 %k, %thread;
LOOP_{size}:
    setp.ge.u64 %p, %k, %units;
    @%p bra REST_{size};
    shl.b64 %t, %k, {log2};
    add.s64 %a, %src, %t;
    add.s64 %b, %dst, %t;
    ld.global.{type} {register}, [%a];
    st.global.{type} [%b], {register};
    add.u64 %k, %k, %threads;
    bra LOOP_{size};
REST_{size}:
    shl.b64 %k, %units, {log2};
    bra BYTES;
NOT_{size}:
"""

_REGISTERS = """
    .reg .pred %p;
    .reg .b16 %h;
    .reg .b32 %row, %block, %size_of_block, %lane, %blocks, %w0, %w1, %w2, %w3;
    .reg .b64 %t, %dst, %src, %size, %both, %thread, %threads, %units, %k, %a, %b, %x;

    mov.u32 %row, %ctaid.y;
    mov.u32 %block, %ctaid.x;
    mov.u32 %lane, %tid.x;
"""

_COPY_ROW = (
    """
    cvta.to.global.u64 %dst, %dst;
    cvta.to.global.u64 %src, %src;
    or.b64 %both, %dst, %src;
    mov.u32 %size_of_block, %ntid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %thread, %block, %size_of_block;
    cvt.u64.u32 %t, %lane;
    add.u64 %thread, %thread, %t;
    mul.wide.u32 %threads, %blocks, %size_of_block;
"""
    + "".join(
        _COPY_UNITS.format(size=size, size_minus_1=size - 1, log2=size.bit_length() - 1, type=kind, register=register)
        for size, (kind, register) in _UNITS.items()
    )
    + """
    mov.u64 %k, 0;
BYTES: // from byte k on
    add.u64 %k, %k, %thread;
LOOP_BYTES:
    setp.ge.u64 %p, %k, %size;
    @%p bra DONE;
    add.s64 %a, %src, %k;
    add.s64 %b, %dst, %k;
    ld.global.u8 %h, [%a];
    st.global.u8 [%b], %h;
    add.u64 %k, %k, %threads;
    bra LOOP_BYTES;
DONE:
    ret;
"""
)
"""Block row y copies %size bytes from %src to %dst, as wide as both addresses allow."""


def _stage_ptx(capacity: int, outputs: int) -> bytes:
    note = f"""
    // the first block notes where the graph's last kernel finds the addresses of the outputs
    or.b32 %w0, %block, %row;
    setp.ne.u32 %p, %w0, 0;
    @%p bra COPY;
    setp.ge.u32 %p, %lane, {outputs};
    @%p bra COPY;
    mul.wide.u32 %t, %lane, 8;
    mov.b64 %a, table;
    add.s64 %a, %a, %t;
    ld.param.u64 %x, [%a+{24 * capacity}];
    ld.param.u64 %b, [table+{24 * capacity + 8 * outputs}];
    cvta.to.global.u64 %b, %b;
    add.s64 %b, %b, %t;
    st.global.u64 [%b], %x;
COPY:
"""
    return f"""
.version 8.0
.target sm_70
.address_size 64

// stage(table): block row y copies nbytes[y] bytes from src[y] to dst[y]. The table is
// {{ u64 dst[{capacity}], nbytes[{capacity}], src[{capacity}], outputs[{outputs}], noted }}
// and travels by value with each launch. Where there are outputs, their addresses are written to memory at noted.
.visible .entry stage(.param .align 8 .b8 table[{8 * (3 * capacity + outputs + 1)}])
{{
{_REGISTERS}
{note if outputs else ""}
    mul.wide.u32 %t, %row, 8;
    mov.b64 %a, table;
    add.s64 %a, %a, %t;
    ld.param.u64 %dst, [%a];
    ld.param.u64 %size, [%a+{8 * capacity}];
    ld.param.u64 %src, [%a+{16 * capacity}];
{_COPY_ROW}
}}
\0""".encode()


def _hand_out_ptx(capacity: int) -> bytes:
    return f"""
.version 8.0
.target sm_70
.address_size 64

// hand_out(table): block row y copies nbytes[y] bytes from src[y] to where the stage kernel noted, if it noted any
// place. The table is {{ u64 src[{capacity}], nbytes[{capacity}], noted }}.
.visible .entry hand_out(.param .align 8 .b8 table[{8 * (2 * capacity + 1)}])
{{
{_REGISTERS}
    mul.wide.u32 %t, %row, 8;
    ld.param.u64 %b, [table+{16 * capacity}];
    cvta.to.global.u64 %b, %b;
    add.s64 %b, %b, %t;
    ld.global.u64 %dst, [%b];
    setp.eq.u64 %p, %dst, 0;
    @%p bra DONE;
    mov.b64 %a, table;
    add.s64 %a, %a, %t;
    ld.param.u64 %src, [%a];
    ld.param.u64 %size, [%a+{8 * capacity}];
{_COPY_ROW}
}}
\0""".encode()


@cache
def set_predicate(index: int) -> Any:
    """The kernel that sets a conditional node's handle from a bool, loaded for the device with this index.

    Raises:
        FeatureUnavailableError: the driver has no conditional nodes.
    """
    features.require("if nodes")
    with torch.cuda.device(index):
        driver.ensure_context()
        return driver.load_kernel(_SET_PREDICATE, "set_predicate")


@cache
def stage(index: int, capacity: int, outputs: int) -> Any:
    """The kernel that copies so many tensors at most, one of CAPACITIES, and notes where so many outputs go, one of
    OUTPUT_CAPACITIES, loaded for the device with this index."""
    with torch.cuda.device(index):
        driver.ensure_context()
        return driver.load_kernel(_stage_ptx(capacity, outputs), "stage")


@cache
def hand_out(index: int, capacity: int) -> Any:
    """The kernel that copies so many outputs at most to where the stage kernel noted, loaded for the device with this
    index."""
    with torch.cuda.device(index):
        driver.ensure_context()
        return driver.load_kernel(_hand_out_ptx(capacity), "hand_out")

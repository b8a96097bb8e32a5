# SPDX-License-Identifier: Apache-2.0
"""Handlers of XLA's foreign function interface (version 0 of xla/ffi/api/c_api.h), called on PyTorch's tensors without
XLA: on PyTorch's stream, with scratch memory from its cache.
"""

import ctypes as C
import itertools

import torch

POINTER, SIZE, INT, LONG = C.c_void_p, C.c_size_t, C.c_int, C.c_int64
EXECUTE = 3  # XLA_FFI_ExecutionStage
BUFFER, SCALAR = 1, 3  # XLA_FFI_ArgType, XLA_FFI_RetType; XLA_FFI_AttrType
DTYPES = {torch.int32: 4, torch.float16: 10, torch.float32: 11, torch.bfloat16: 16}  # XLA_FFI_DataType
SCALARS = {bool: (1, C.c_bool), int: (5, C.c_int64), float: (12, C.c_double)}  # the same, and how it lies in memory


def struct(name, **fields):
    """A structure of the interface: each begins with its size and a list of extensions."""
    head = [("struct_size", SIZE), ("extension_start", POINTER)]
    return type(name, (C.Structure,), {"_fields_": [*head, *fields.items()]})


def made(kind, *fields):
    return kind(C.sizeof(kind), None, *fields)


class Span(C.Structure):
    _fields_ = [("ptr", C.c_char_p), ("len", SIZE)]


class Scalar(C.Structure):
    _fields_ = [("dtype", INT), ("value", POINTER)]


Version = struct("Version", major=INT, minor=INT)
Buffer = struct("Buffer", dtype=INT, data=POINTER, rank=LONG, dims=POINTER)
Buffers = struct("Buffers", size=LONG, types=POINTER, items=POINTER)
Attributes = struct("Attributes", size=LONG, types=POINTER, names=POINTER, items=POINTER)
Frame = struct(
    "Frame", api=POINTER, context=POINTER, stage=INT, args=Buffers, rets=Buffers, attrs=Attributes, future=POINTER
)
ErrorCreate = struct("ErrorCreate", message=C.c_char_p, code=INT)
ErrorMessage = struct("ErrorMessage", error=POINTER, message=C.c_char_p)
ErrorDestroy = struct("ErrorDestroy", error=POINTER)
Stream = struct("Stream", context=POINTER, stream=POINTER)
Allocate = struct("Allocate", context=POINTER, size=SIZE, alignment=SIZE, data=POINTER)
Free = struct("Free", context=POINTER, size=SIZE, data=POINTER)
Ordinal = struct("Ordinal", context=POINTER, ordinal=C.c_int32)
FUNCTIONS = {  # XLA_FFI_Api's, in its order; None: what no handler here asks for
    "error_create": ErrorCreate,
    "error_message": ErrorMessage,
    "error_destroy": ErrorDestroy,
    "handler_register": None,
    "stream_get": Stream,
    "type_register": None,
    "context_get": None,
    "state_set": None,
    "state_get": None,
    "memory_allocate": Allocate,
    "memory_free": Free,
    "thread_pool_schedule": None,
    "thread_pool_size": None,
    "future_create": None,
    "future_set_available": None,
    "future_set_error": None,
    "run_id_get": None,
    "device_ordinal_get": Ordinal,
    "context_find_extension": None,
}
CALLBACKS = {name: C.CFUNCTYPE(POINTER, C.POINTER(kind)) if kind else POINTER for name, kind in FUNCTIONS.items()}
Api = struct("Api", version=Version, internal=POINTER, **CALLBACKS)


class Host:
    """XLA's side of the interface, on a device of PyTorch's. An error is a number until it is destroyed."""

    def __init__(self, device):
        self.device, self.errors, self.scratch, self.numbers = device, {}, {}, itertools.count(1)
        functions = [CALLBACKS[name](getattr(self, name)) if kind else None for name, kind in FUNCTIONS.items()]
        self.api = made(Api, made(Version, 0, 1), None, *functions)

    def error_of(self, message):
        number = next(self.numbers)
        self.errors[number] = message
        return number

    def error_create(self, args):
        return self.error_of(args.contents.message)

    def error_message(self, args):
        args.contents.message = self.errors[args.contents.error]

    def error_destroy(self, args):
        del self.errors[args.contents.error]

    def stream_get(self, args):
        args.contents.stream = torch.cuda.current_stream(self.device).cuda_stream

    def memory_allocate(self, args):
        try:
            memory = torch.empty(max(args.contents.size, 1), dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            return self.error_of(str(error).encode())
        self.scratch[memory.data_ptr()] = memory
        args.contents.data = memory.data_ptr()

    def memory_free(self, args):
        del self.scratch[args.contents.data]

    def device_ordinal_get(self, args):
        args.contents.ordinal = self.device.index or 0

    def call(self, handler, inputs, outputs, **attributes):
        """Enqueues `handler`, a function of a library, on contiguous tensors; a RuntimeError with its message if it
        refuses them. Its attributes are bools, ints and floats, these of 64 bits."""
        handler.restype = POINTER
        lists = Tensors(inputs), Tensors(outputs), Scalars(attributes)
        frame = made(Frame, C.addressof(self.api), None, EXECUTE, *(each.struct for each in lists), None)
        frame.struct_size = Frame.future.offset  # XLA counts all but this output
        if error := handler(C.byref(frame)):
            raise RuntimeError(self.errors.pop(error).decode())


class Tensors:
    """`struct`, the list of a frame's tensors, and the memory that it points to."""

    def __init__(self, tensors):
        if any(not x.is_contiguous() for x in tensors):
            raise ValueError("a handler of XLA's takes contiguous tensors alone")
        self.dims = [(LONG * x.dim())(*x.shape) for x in tensors]
        self.buffers = [
            made(Buffer, DTYPES[x.dtype], x.data_ptr(), x.dim(), C.addressof(dims))
            for x, dims in zip(tensors, self.dims)
        ]
        self.types, self.items = repeated(BUFFER, len(tensors)), addresses(self.buffers)
        self.struct = made(Buffers, len(tensors), C.addressof(self.types), C.addressof(self.items))


class Scalars:
    """`struct`, the list of a frame's attributes, sorted by name, and the memory that it points to."""

    def __init__(self, attributes):
        names = sorted(attributes)
        kinds = [SCALARS[type(attributes[name])] for name in names]
        self.values = [as_stored(attributes[name]) for name, (_, as_stored) in zip(names, kinds)]
        self.scalars = [Scalar(dtype, C.addressof(value)) for (dtype, _), value in zip(kinds, self.values)]
        self.spans = [Span(name.encode(), len(name)) for name in names]
        self.types, self.names = repeated(SCALAR, len(names)), addresses(self.spans)
        self.items = addresses(self.scalars)
        self.struct = made(Attributes, len(names), *map(C.addressof, (self.types, self.names, self.items)))


def repeated(value, count):
    return (INT * count)(*[value] * count)


def addresses(structs):
    return (POINTER * len(structs))(*map(C.addressof, structs))

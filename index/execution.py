"""How onnxruntime runs an encoder: threads and device.

onnxruntime silently falls back to the CPU if CUDA is not available; here that is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from index.errors import DeviceUnavailable

if TYPE_CHECKING:
    import onnxruntime as ort

CUDA_PROVIDER = "CUDAExecutionProvider"
CPU_PROVIDER = "CPUExecutionProvider"


class Device(StrEnum):
    """What encoders run on, or sealed segments are searched on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Execution:
    """How the models of a version are run.

    Attributes:
        threads: CPU threads for one run.
        device: the device of all models of the version.
    """

    threads: int = 1
    device: Device = Device.CPU

    def open(self, content: bytes) -> ort.InferenceSession:
        """Open a session of an ONNX model.

        Raises:
            DeviceUnavailable: the model cannot run on the device.
            Exception: of onnxruntime, if the model is invalid.
        """
        import onnxruntime as ort

        self.check()
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.log_severity_level = 4  # failures become exceptions
        wanted = [CUDA_PROVIDER, CPU_PROVIDER] if self.device is Device.CUDA else [CPU_PROVIDER]
        session = ort.InferenceSession(content, options, providers=wanted)
        if session.get_providers()[0] != wanted[0]:
            raise DeviceUnavailable("onnxruntime cannot use CUDA: its driver or libraries are missing or too old")
        return session

    def check(self) -> None:
        """Raise DeviceUnavailable if onnxruntime was built without support for the device."""
        import onnxruntime as ort

        if self.device is Device.CUDA and CUDA_PROVIDER not in (there := ort.get_available_providers()):
            legal = "pip install 'regraft[gpu]' instead of regraft[serve], or REGRAFT_ENCODER_DEVICE=cpu"
            raise DeviceUnavailable(f"the device cuda needs an onnxruntime with {CUDA_PROVIDER}, not {there}: {legal}")


ONE_THREAD = Execution()
"""One thread of the CPU."""

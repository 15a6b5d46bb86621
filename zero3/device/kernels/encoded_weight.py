"""Encoded weights on a device: on a GPU, kernels.cu decodes them in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from optim_cpu.dtypes import DTYPES
from optim_cpu.quantization import NF4_VALUES, Weight, dynamic_map, table
from zero3.device.kernels import cuda_library, fused


class DeviceWeight(Weight):
    """A ``Weight`` on any device. It is decoded to the same bits on each, by kernels or by torch operations."""

    def _decoded_elsewhere(
        self, dtype: torch.dtype, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Tensor:
        kernels = cuda_library.kernels_of(self._codes)
        if kernels is None or dtype not in DTYPES:
            return super()._decoded_elsewhere(dtype, rows, columns)
        out = torch.empty(
            (rows[1] - rows[0], columns[1] - columns[0]), dtype=dtype, device=self._codes.device
        )
        # Whole rows follow each other without gaps, as one long row.
        flat = out.view(1, -1) if out.shape[1] == self.columns else out
        fused.decode(kernels, flat, self._form.code, self._part(rows[0] * self.columns + columns[0]))
        return out

    def _part(self, first: int) -> fused.Part:
        """From element ``first`` on, in rows of the matrix."""
        device, form = self._codes.device, self._form
        part = fused.Part(
            codes=self._codes.data_ptr(),
            values=table(NF4_VALUES, device).data_ptr(),
            first=first,
            stride=self.columns,
            block_shift=form.group_size.bit_length() - 1,
        )
        if form.double_quantised:
            offset, group_scales, codes = self._scale_parts()
            part.offset, part.group_scales = offset.data_ptr(), group_scales.data_ptr()
            part.scale_codes, part.map = codes.data_ptr(), table(dynamic_map(), device).data_ptr()
        else:
            part.scales = self._scales.data_ptr()
        return part

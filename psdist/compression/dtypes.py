"""numpy dtypes of payloads."""

from __future__ import annotations

import ml_dtypes
import numpy as np

#: numpy dtype for each dtype that a payload may hold.
NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype("<f8"),
}

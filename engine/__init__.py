"""The training engine: explicit, distributed training loops for TensorFlow 2. Reads no flag and no environment.

Runs on the host, except what says "Replica code", and the folders whose first line says so. What users import from it
are names of `crankshaft`.

Raises:
  ImportError: Keras already runs on another backend than TensorFlow.
"""

import os
import sys

if __name__ == "engine":
    raise ImportError("engine is a part of crankshaft; write `import crankshaft.engine` instead of `import engine`")

# tf.keras works only on TensorFlow. Keras reads this variable when it is imported, also by TensorFlow; for other
# programs the variable or ~/.keras/keras.json may name another backend.
os.environ["KERAS_BACKEND"] = "tensorflow"
_keras = sys.modules.get("keras.src.backend.config")  # imported even if Keras failed because its backend is missing
if _keras is not None and _keras.backend() != "tensorflow":
    raise ImportError(
        f"Keras runs on {_keras.backend()}, by KERAS_BACKEND or keras.json, and crankshaft needs tensorflow; set "
        "KERAS_BACKEND=tensorflow, in the shell or, before keras is imported, in os.environ"
    )

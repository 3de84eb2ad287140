"""Rows of samples -> `Batch`: tensors, document boundaries, columns; or the inputs of a model of transformers."""

from tune.collators.batch import IGNORE, Batch, Documents, Part, Sample, collate
from tune.collators.inputs import collate_inputs

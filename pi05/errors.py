"""The exceptions a user may catch. Each is a ValueError whose text says what is wrong, where, and what to do."""


class Pi05Error(ValueError):
    """Base of every error pi05 raises on purpose."""


class SpecError(Pi05Error):
    """A ModelSpec whose sizes contradict each other."""


class BatchError(Pi05Error):
    """A Batch whose field has a wrong shape, dtype or content."""


class ParamsError(Pi05Error):
    """A set of tensors that does not match the parameter table: missing, unexpected or of a wrong shape."""


class DataError(Pi05Error):
    """A dataset, a robot description or statistics that cannot be used as they are."""


class ConfigError(Pi05Error):
    """A configuration that is unknown, contradicts itself or asks for what a backend cannot do."""


class CheckpointError(Pi05Error):
    """A checkpoint that is not there, not whole, or not what it is taken for."""


class NonFiniteLoss(Pi05Error):  # noqa: N818, what stopped the run
    """A run that was stopped because its loss or gradient was not finite; the text says how to replay the step."""

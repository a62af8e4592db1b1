from .schema import PrecisionConfig
def load_precision(n): return PrecisionConfig()

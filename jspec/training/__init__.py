"""Training drafts: text by the target, the papers' losses, one loop."""

from jspec.training.distill import Distill as Distill
from jspec.training.eagle import Eagle as Eagle
from jspec.training.medusa import Medusa as Medusa

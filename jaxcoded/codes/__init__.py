"""Gradient codes. Each constructor returns a `GradientCode`."""

from jaxcoded.codes._adaptive import adaptive as adaptive
from jaxcoded.codes._approximate import approximate as approximate
from jaxcoded.codes._block_design import block_design as block_design
from jaxcoded.codes._cyclic_repetition import cyclic_repetition as cyclic_repetition
from jaxcoded.codes._distance import minimum_distance as minimum_distance
from jaxcoded.codes._expander import expander as expander
from jaxcoded.codes._fractional_repetition import (
    fractional_repetition as fractional_repetition,
)
from jaxcoded.codes._gaussian_mds import gaussian_mds as gaussian_mds
from jaxcoded.codes._gradient_code import Decoding as Decoding
from jaxcoded.codes._gradient_code import GradientCode as GradientCode
from jaxcoded.codes._grouped import grouped as grouped
from jaxcoded.codes._hamming import hamming as hamming
from jaxcoded.codes._ignore_stragglers import ignore_stragglers as ignore_stragglers
from jaxcoded.codes._linear import linear as linear
from jaxcoded.codes._named import NAMES as NAMES
from jaxcoded.codes._named import named as named
from jaxcoded.codes._partial_stragglers import partial_stragglers as partial_stragglers
from jaxcoded.codes._polynomial import polynomial as polynomial
from jaxcoded.codes._progressive import progressive as progressive
from jaxcoded.codes._random_generator import random_generator as random_generator
from jaxcoded.codes._reed_solomon import reed_solomon as reed_solomon
from jaxcoded.codes._single_parity_check import (
    single_parity_check as single_parity_check,
)
from jaxcoded.codes._sparse import bernoulli as bernoulli
from jaxcoded.codes._sparse import stochastic_block as stochastic_block
from jaxcoded.codes._uncoded import uncoded as uncoded

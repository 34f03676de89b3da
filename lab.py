import itertools, sys
sys.path[:0] = ["/work/wt/rtl", "/work/wt/rtl/kernels"]
import numpy as np, torch, qsim
from typing import NamedTuple
from qsim.silicon.circuits import Circuit
from qsim_kernels.arithmetic import direct
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import SINGLE, grid_bits
from qsim_kernels.numbers.encoding import coding_bits
from qsim_kernels.numbers.grid import Mode, Overflow

from qsim_kernels.numbers.direct import direct_numbers
from qsim_kernels.numbers.encoding import Encoding
def numbers_of(c):
    return direct_numbers(Encoding(c.format.grid, c.rule, c.format.coding)) or "unsupported"
def where(c, a, b):
    if isinstance(c, (int, bool, np.bool_)) : return a if c else b
    return np.where(c, a, b)
class I(np.ndarray): pass
FN = bound(direct, {"where": where, "MAGNITUDE": 0x7fffffff, "INFINITY": 0x7f800000, "MANTISSA": 23})
if __name__ == "__main__":
    g = torch.Generator().manual_seed(0)
    x16 = (torch.arange(0, 65536, 7) << 16)
    xr = torch.randint(0, 2**32, (2000,), generator=g)
    # numbers around formats' range
    e = torch.randint(90, 160, (6000,), generator=g); xn = (torch.randint(0, 2, (6000,), generator=g) << 31) | (e << 23) | (torch.randint(0, 1 << 23, (6000,), generator=g) & -(1 << torch.randint(0, 23, (6000,), generator=g)))
    word = torch.cat([x16, xr, xn]); xf = torch.tensor(word.numpy().astype(np.uint32).view(np.float32))
    formats = sys.argv[1:] or ["e4m3","e5m2","e2m1","e3m2","e2m3","e4m3fnuz","e5m2fnuz","bf16","fp16","tf32","Float(4,3)","Float(2,2,bias=0)","Float(3,0)","Float(5,3,signed=False)","Float(4,3,subnormals=False)","Float(3,1,subnormals=False,specials='ieee')","int8","int4","Int(8, symmetric=True)","Fixed(8,4)","Fixed(8,4,signed=False)","Fixed(6,10)","Int(16)","Float(8,1)","Float(8,3,specials='ieee')","Float(7,3)","e4m3b11fnuz","e1m2","Float(1,3)", "Float(1,0)"]
    bad = tot = 0; skipped = {}
    for f in formats:
        for r in ["nearest","nearest_away","nearest_up","nearest_down","toward_zero","up","down","odd","Stochastic(8)","Stochastic(1)","Stochastic(5, correction=True)","stochastic","Stochastic(16)"]:
            for o in ["saturate","saturate_symmetric","nonfinite"]:
                try: c = Circuit(f, "encode", r, o)
                except ValueError as err: skipped[f, o] = str(err)[:60]; continue
                nv = numbers_of(c)
                if isinstance(nv, str): skipped[f, r, o] = nv; continue
                random = torch.randint(0, 1 << c.random_bits, word.shape, generator=g) if c.random_bits else torch.zeros_like(word)
                y = FN.code_of_rounded(word.numpy(), random.numpy(), *nv)
                from qsim.silicon.golden import results
                want = results(c, word, random).numpy()
                d = (np.asarray(y) != want); tot += 1
                if d.any():
                    bad += 1; i = np.nonzero(d)[0][0]
                    print(f, r, o, int(d.sum()), hex(int(word[i])), float(xf[i]), "got", hex(int(np.asarray(y)[i])), "want", hex(int(want[i])), flush=True)
    print(tot, "settings", bad, "differ"); 
    from collections import Counter
    print(Counter((k[0], v) for k, v in skipped.items()))

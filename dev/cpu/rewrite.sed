# Turns CUDA C++ into C++ for the CPU device: sed -f rewrite.sed kernel.cu
# Only what no macro can do is done here, and a line stays a line, so compiler messages point into the real file.

# Comments stay.
/^[[:space:]]*\/\//b

# Launches. k<<<grid, block>>>(x) becomes k %cpu::config(grid, block)(x): the operator % launches.
# The hold space says "open" while a configuration runs on over line ends; then its first >>> closes it. A >>> outside
# a configuration is three templates ending, and stays.
x
/open/{
    x
    s/>>>[[:space:]]*(/)(/
    t closed
    s/>>>[[:space:]]*$/)/
    t closed
    b shared
    :closed
    x
    s/open//
}
x
:launch
s/\(.*\)<<<\([^>]*\)>>>[[:space:]]*(/\1 %cpu::config(\2)(/
t launch
s/\(.*\)<<<\(.*\)>>>[[:space:]]*(/\1 %cpu::config(\2)(/
t launch
s/\(.*\)<<<\(.*\)>>>[[:space:]]*$/\1 %cpu::config(\2)/
t launch
/<<</{
    s/<<</ %cpu::config(/
    x
    s/.*/open/
    x
}

:shared
# extern __shared__ T name[]; becomes a pointer to the block's dynamic shared memory.
/extern.*__shared__.*\[[[:space:]]*\]/{
    s/alignas([^;]*)//
    s/__align__([^;]*)//
    s/\[[[:space:]]*\];/[];/
    s/extern[[:space:]]*__shared__[[:space:]]*\([^;]*[^;[:space:]]\)[[:space:]]\{1,\}\([A-Za-z0-9_]*\)\[\];/\
\1 *const \2 = static_cast<\1 *>(cpu::dynamic_shared);/
    s/\n//
}

# __shared__ T name[n]; keeps its place (the macro makes it thread_local: one OS thread runs a block) and is filled with
# 0xFF when the block's first thread comes by. C++ wants alignas in front, and static once. One variable a declaration:
# of several, only the last is filled.
s/static[[:space:]]\{1,\}__shared__/__shared__/
s/__shared__[[:space:]]*\(alignas([^()]*\(([^()]*)[^()]*\)*)\)/\1 __shared__/
s/\(__shared__[^;={]*[^A-Za-z0-9_;={]\)\([A-Za-z0-9_]\{1,\}\)\(\(\[[^];]*\]\)*\)[[:space:]]*;/\1\2\3; cpu::poison(\2);/

/* How the library names the ranks that are given as arguments. */
#include "native.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    ranks_t ranks = {0, 0, {{0}}};
    char text[512];
    for (int i = 1; i < argc; i++) ranks_add(&ranks, atoi(argv[i]));
    ranks_text(&ranks, text, sizeof text);
    puts(text);
    return 0;
}

/* Common parts of the fuzz targets. A target is a file with LLVMFuzzerTestOneInput(); -DFUZZ_REPLAY
 * adds a main() that runs given files, in place of libFuzzer's. */
#pragma once

#include "../c/support.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#ifdef FUZZ_REPLAY
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        CHECK(file != NULL);
        uint8_t *data = malloc(1 << 20);
        CHECK(data != NULL);
        size_t size = fread(data, 1, 1 << 20, file);
        fclose(file);
        /* A block of exactly its size: a sanitizer sees a byte too many. */
        uint8_t *exact = realloc(data, size > 0 ? size : 1);
        CHECK(exact != NULL);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%s: %d cases\n", argv[0], argc - 1);
    return 0;
}
#endif

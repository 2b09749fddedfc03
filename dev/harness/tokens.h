// Token ids, from the seed or from a token file.
#pragma once
#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "command_line.h"
#include "inputs.h"

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// from the seed

inline std::vector<int> uniform_tokens(long long N, int V, uint64_t seed) {
    const Random random(1000, seed);
    std::vector<int> ids(N);
    for (long long i = 0; i < N; i++) ids[i] = (int)(random.uniform(i) * V);
    return ids;
}

// Rank r has weight r^-1.1. The ranks are shuffled over the ids, so that frequent rows lie anywhere in the table.
inline std::vector<int> zipf_tokens(long long N, int V, uint64_t seed) {
    const Random random(1000, seed), shuffle(1001, seed);
    std::vector<double> cumulative(V);
    std::vector<int> id_of_rank(V), ids(N);
    double sum = 0;
    for (int r = 0; r < V; r++) {
        cumulative[r] = sum += pow(r + 1.0, -1.1);
        id_of_rank[r] = r;
    }
    for (int r = V - 1; r > 0; r--) std::swap(id_of_rank[r], id_of_rank[(int)(shuffle.uniform(r) * (r + 1))]);
    for (long long i = 0; i < N; i++) {
        const auto rank = std::upper_bound(cumulative.begin(), cumulative.end(), random.uniform(i) * sum);
        ids[i] = id_of_rank[std::min<long long>(rank - cumulative.begin(), V - 1)];
    }
    return ids;
}

// Nine of ten positions hold the same id, the others zipf ids.
inline std::vector<int> padded_tokens(long long N, int V, uint64_t seed) {
    const Random padding(1003, seed);
    std::vector<int> ids = zipf_tokens(N, V, seed);
    for (long long i = 0; i < N; i++) ids[i] = padding.uniform(i) < 0.9 ? V / 2 : ids[i];
    return ids;
}

// ---------------------------------------------------------------------------------------------------------------------
// from a file

// An llm.c token file: a header of 256 int32 (magic, version, count), then the ids: uint16 after magic 20240520 version
// 1 (GPT-2), uint32 after magic 20240801 version 7 (Llama 3).
class TokenFile {
  public:
    // Opens a file and reads its header. Refuses a file whose size contradicts the count in the header.
    explicit TokenFile(const std::string &name) : path(name) {
        struct stat status = {};
        if (stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode)) file = fopen(path.c_str(), "rb");
        if (!file && status.st_mode != 0 && !S_ISREG(status.st_mode)) {
            const char *const kind = S_ISDIR(status.st_mode)    ? "directory"
                                     : S_ISFIFO(status.st_mode) ? "pipe"
                                     : S_ISSOCK(status.st_mode) ? "socket"
                                                                : "device";
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' is a %s, not a token file", path.c_str(), kind);
        }
        if (!file) {
            refuse(EXIT_BAD_INPUT,
                   "--tokens: '%s' is neither uniform, zipf, one, sorted or padded, nor a file that opens: %s",
                   path.c_str(), strerror(errno));
        }
        read_header((long long)status.st_size);
    }
    TokenFile(const TokenFile &) = delete;
    ~TokenFile() { fclose(file); }

    // Ids begin..begin+N-1. Refuses ids outside 0..V-1.
    std::vector<int> read(long long N, int V, int begin) {
        if (count - begin < N) {
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' has %lld tokens; %s = %lld are needed (-b, -t)", path.c_str(), count,
                   begin > 0 ? "B*T + 1" : "B*T", N + begin);
        }
        std::vector<int> ids(N);
        std::vector<unsigned char> data((size_t)std::min(N, kPart) * width);
        bool complete = fseeko(file, kHeaderBytes + (off_t)begin * width, SEEK_SET) == 0;
        for (long long first = 0; first < N && complete; first += kPart) {
            const size_t part = (size_t)std::min(N - first, kPart);
            complete = fread(data.data(), width, part, file) == part;
            for (size_t i = 0; i < part && complete; i++) {
                uint32_t id = 0;
                memcpy(&id, &data[i * width], width);  // little-endian, as every machine with CUDA is
                if (id >= (uint32_t)V) {
                    refuse(EXIT_BAD_INPUT, "--tokens: '%s' has id %u at position %lld; -v %d allows 0 to %d",
                           path.c_str(), id, begin + first + (long long)i, V, V - 1);
                }
                ids[first + i] = (int)id;
            }
        }
        if (!complete) refuse(EXIT_BAD_INPUT, "--tokens: cannot read '%s' to its end", path.c_str());
        return ids;
    }

  private:
    static constexpr int kHeaderBytes = 256 * sizeof(int32_t);
    static constexpr long long kPart = 1 << 20;  // ids that are read at once

    const std::string path;
    FILE *file = nullptr;
    int width = 0;  // bytes of an id
    long long count = 0;

    void read_header(long long file_bytes) {
        int32_t header[256] = {};
        if (fread(header, sizeof(int32_t), 256, file) != 256) {
            if (ferror(file)) refuse(EXIT_BAD_INPUT, "--tokens: cannot read '%s': %s", path.c_str(), strerror(errno));
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' is shorter than a token file's header of %d bytes", path.c_str(),
                   kHeaderBytes);
        }
        width = header[0] == 20240520 && header[1] == 1 ? 2 : header[0] == 20240801 && header[1] == 7 ? 4 : 0;
        if (width == 0) {
            refuse(EXIT_BAD_INPUT,
                   "--tokens: '%s' has magic %d version %d; a token file has 20240520 version 1 or 20240801 version 7",
                   path.c_str(), header[0], header[1]);
        }
        count = header[2];
        const long long id_bytes = file_bytes - kHeaderBytes;
        if (count < 0 || id_bytes != count * width) {
            refuse(EXIT_BAD_INPUT, "--tokens: '%s' says %lld tokens of %d bytes, but %lld bytes follow its header",
                   path.c_str(), count, width, id_bytes);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// from either source

// N ids in 0..V-1 from a source of the option --tokens. From a file: ids begin..begin+N-1.
inline std::vector<int> make_tokens(const std::string &source, long long N, int V, int begin, uint64_t seed) {
    if (source == "uniform") return uniform_tokens(N, V, seed);
    if (source == "zipf") return zipf_tokens(N, V, seed);
    if (source == "one") return std::vector<int>(N, V / 2);
    if (source == "padded") return padded_tokens(N, V, seed);
    if (source == "sorted") {
        std::vector<int> ids = uniform_tokens(N, V, seed);
        std::sort(ids.begin(), ids.end());
        return ids;
    }
    return TokenFile(source).read(N, V, begin);
}

// The same as targets: from a file, the id after each of the first N ids. Every ignore_every-th target is ignore_index;
// none if ignore_every is 0.
inline std::vector<int> make_targets(const std::string &source, long long N, int V, int ignore_every, int ignore_index,
                                     uint64_t seed) {
    std::vector<int> ids = make_tokens(source, N, V, 1, seed);
    for (long long i = ignore_every - 1LL; ignore_every > 0 && i < N; i += ignore_every) ids[i] = ignore_index;
    return ids;
}

// The number of different ids. All must be 0 or more.
inline long long count_distinct(const std::vector<int> &ids) {
    std::vector<bool> present(ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end()) + 1LL);
    for (int id : ids) present[id] = true;
    return std::count(present.begin(), present.end(), true);
}

// The positions of each index, for the references: positions[begin[row]] to positions[begin[row+1]-1], ascending.
struct PositionsOfRows {
    std::vector<int> begin, positions;
    const int *of(long long row) const { return positions.data() + begin[row]; }
    int count(long long row) const { return begin[row + 1] - begin[row]; }

    PositionsOfRows(const std::vector<int> &ids, int V) : begin(V + 1LL), positions(ids.size()) {
        for (int id : ids) begin[id + 1LL]++;
        for (long long row = 0; row < V; row++) begin[row + 1] += begin[row];
        std::vector<int> next = begin;
        for (size_t i = 0; i < ids.size(); i++) positions[next[ids[i]]++] = (int)i;
    }
};

}  // namespace bookends

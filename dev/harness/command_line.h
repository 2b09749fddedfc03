// The command line of a program: its options, their values, --help, --list, and refusals.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base.h"
#include "progress.h"

namespace bookends {

enum ExitStatus { EXIT_OK = 0, EXIT_WRONG = 1, EXIT_BAD_INPUT = 2, EXIT_NO_DEVICE = 3 };

// Ends the program: prints the program's name and the message as one line on stderr.
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void refuse(ExitStatus status, const char *pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    std::string line = format_list(pattern, arguments);
    va_end(arguments);
    for (char &c : line) {
        if ((unsigned char)c < 0x20) c = '?';  // a value in the message may hold a line feed
    }
    progress.stop();
    fprintf(stderr, "%s: %s\n", progress.program.c_str(), line.c_str());
    exit(status);
}

// ---------------------------------------------------------------------------------------------------------------------
// options

// A dimension of the problem, option -FLAG. A default of 0 means that the value depends on other options.
struct Dim {
    char flag;
    const char *name;
    int cuda_default, cpu_default;
    const char *default_text = nullptr;  // describes a default of 0
    int value = 0;

    int default_value() const { return ON_CPU ? cpu_default : cuda_default; }
};

// An option with a fixed list of values; the first is the default. An option without values is a flag.
struct Choice {
    const char *option;
    std::vector<const char *> values;
    const char *help;
    size_t chosen = 0;  // index of the value; of a flag, 1 if it is given
};

// An option with a number from `least` to `most`.
struct Number {
    const char *option;
    double default_value, least, most;
    const char *help;
    bool whole = false;
    double value = 0;

    std::string text() const { return format(whole ? "%.0f" : "%.9g", value); }
};

// An option whose value is any text. The program validates it.
struct Text {
    const char *option, *default_value, *help;
    std::string value = "";
};

// A version, as --list prints it.
struct ListedVersion {
    int number;
    const char *name, *idea;
};

// The name of an option in the heading and in JSON: grad_dtype for --grad-dtype.
inline std::string key_of(const char *option) {
    std::string key = option + 2;
    std::replace(key.begin(), key.end(), '-', '_');
    return key;
}

// The options that a program has, and their values.
struct Options {
    const char *name, *title;  // of the program
    std::vector<Dim> dims;
    std::vector<Choice> choices;
    std::vector<Number> numbers;
    std::vector<Text> texts;
    bool has_block_size = true;           // whether there is an option --block-size
    std::vector<ListedVersion> versions;  // the last one is the default

    int version = -1;  // -1: all
    std::string dtype = "bf16", token_source = "uniform", json_path;
    int block_size = 0, repeat = 0;  // 0: not given
    bool do_check = true, do_bench = true, brief = false, list = false;
    uint64_t seed = 42;

    Options(const char *program, const char *does, std::vector<Dim> own_dims, std::vector<Choice> own_choices,
            std::vector<Number> own_numbers, std::vector<Text> own_texts)
        : name(program),
          title(does),
          dims(std::move(own_dims)),
          choices(std::move(own_choices)),
          numbers(std::move(own_numbers)),
          texts(std::move(own_texts)) {
        for (Dim &d : dims) d.value = d.default_value();
        for (Number &n : numbers) n.value = n.default_value;
        for (Text &t : texts) t.value = t.default_value;
    }

    // The value of a dimension; 0 if the program does not have it.
    int dim(char flag) const {
        for (const Dim &d : dims) {
            if (d.flag == flag) return d.value;
        }
        return 0;
    }

    // The value of a dimension whose default is 0. If it was not given, it becomes `value`, also in the reports.
    int dim_or(char flag, int value) {
        for (Dim &d : dims) {
            if (d.flag == flag && d.value == 0) d.value = value;
        }
        return dim(flag);
    }

    // Values of options by their full names: choice("--rounding"), flag("--overwrite"), number("--softcap").
    std::string choice(const char *option) const {
        const Choice &c = find(choices, option);
        return c.values[c.chosen];
    }
    bool flag(const char *option) const { return find(choices, option).chosen != 0; }
    double number(const char *option) const { return find(numbers, option).value; }
    std::string text(const char *option) const { return find(texts, option).value; }

  private:
    template <typename Option>
    const Option &find(const std::vector<Option> &options, const std::string &option) const {
        for (const Option &o : options) {
            if (option == o.option) return o;
        }
        fprintf(stderr, "%s: the program asks for %s, which it does not declare\n", name, option.c_str());
        abort();
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// --help and --list

// Returns the status. Refuses if standard output could not be written.
inline int finish(int status) {
    if (fflush(stdout) != 0 || ferror(stdout)) {
        refuse(EXIT_BAD_INPUT, "cannot write the report: %s", strerror(errno));
    }
    return status;
}

inline std::string values_of(const Choice &c) { return joined({c.values.begin(), c.values.end()}); }

inline void print_own_options(const Options &options) {
    for (const Choice &c : options.choices) {
        if (c.values.empty()) {
            printf("  %-25s %s\n", c.option, c.help);
        } else {
            printf("  %-25s %s: %s; default %s\n", (c.option + std::string(" VALUE")).c_str(), c.help,
                   values_of(c).c_str(), c.values[0]);
        }
    }
    for (const Number &n : options.numbers) {
        printf("  %-25s %s; default %g\n", (n.option + std::string(n.whole ? " INT" : " NUMBER")).c_str(), n.help,
               n.default_value);
    }
    for (const Text &t : options.texts) {
        printf("  %-25s %s; default %s\n", (t.option + std::string(" TEXT")).c_str(), t.help, t.default_value);
    }
}

inline void print_help(const Options &options) {
    printf("%s: %s\n\nusage: ./%s [VERSION|all] [options]\n", options.name, options.title, options.name);
    printf("  VERSION 0 runs the CPU reference alone. Default: %d, which is deterministic and the fastest over the\n"
           "  measured shapes. --list shows all versions.\n"
           "  A value may be joined to its option: -b4, --dtype=fp32. Of a repeated option, the last counts.\n\n",
           options.versions.back().number);
    for (const Dim &d : options.dims) {
        printf("  -%c INT                    %s, default %s\n", d.flag, d.name,
               d.default_text ? d.default_text : std::to_string(d.default_value()).c_str());
    }
    printf("  --dtype TYPE              fp32, fp16 or bf16; default bf16\n");
    print_own_options(options);
    printf("  --tokens SOURCE           uniform, zipf (exponent 1.1, shuffled), one (all the same), sorted (uniform,\n"
           "                            ascending), padded (90%% one id, the others zipf), or an llm.c token file\n"
           "                            (its first B*T ids; as targets, the id after each); default uniform\n");
    if (options.has_block_size) {
        printf("  --block-size INT          threads per block, a multiple of 32 up to 1024; default: 32, 64, 128,\n"
               "                            256, 512, 1024 and the library's\n");
    }
    printf("  --check | --bench         only check, or only time\n"
           "  --repeat INT              cold runs per measurement; default: until the median settles, at least 5\n"
           "  --seed INT                seed of the inputs; default 42\n"
           "  --brief                   one line per version, at its best setting\n"
           "  --json FILE               append one JSON object per line to FILE (-: standard output)\n"
           "  --list                    list the versions: number, name, idea\n"
           "\nexit status: 0 as expected; 1 a result was wrong; 2 bad command line or input file; 3 no device, or too "
           "little memory\n");
}

inline void print_list(const Options &options) {
    for (const ListedVersion &v : options.versions) {
        if (options.json_path.empty()) {
            printf("%d  %-16s %s\n", v.number, v.name, v.idea);
        } else {
            printf("{\"kernel\": \"%s\", \"version\": %d, \"name\": %s, \"idea\": %s}\n", options.name, v.number,
                   quoted(v.name).c_str(), quoted(v.idea).c_str());
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// parsing

inline long long parse_integer(const std::string &option, const char *text, long long least, long long most) {
    char *end = nullptr;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (isspace((unsigned char)*text) || end == text || *end != '\0' || errno != 0 || value < least || value > most) {
        refuse(EXIT_BAD_INPUT, "%s: '%s' is not an integer from %lld to %lld", option.c_str(), text, least, most);
    }
    return value;
}

inline double parse_number(const Number &n, const char *text) {
    if (n.whole) return (double)parse_integer(n.option, text, (long long)n.least, (long long)n.most);
    char *end = nullptr;
    const double value = strtod(text, &end);
    const bool decimal = text[strspn(text, "+-.0123456789eE")] == '\0';  // not 0x10, nan or a blank
    if (!decimal || end == text || *end != '\0' || !(n.least <= value && value <= n.most)) {
        refuse(EXIT_BAD_INPUT, "%s: '%s' is not a number from %g to %g", n.option, text, n.least, n.most);
    }
    if (value != 0 && (float)value == 0) refuse(EXIT_BAD_INPUT, "%s: '%s' is 0 as a float", n.option, text);
    return value;
}

// The index of `text` among the values. Refuses a text that is none of them.
inline size_t parse_choice(const std::string &option, const std::vector<const char *> &values, const char *text) {
    const auto value = std::find(values.begin(), values.end(), std::string(text));
    if (value == values.end()) {
        refuse(EXIT_BAD_INPUT, "%s: '%s' is not one of %s", option.c_str(), text,
               joined({values.begin(), values.end()}).c_str());
    }
    return value - values.begin();
}

inline int parse_version(const Options &options, const std::string &text) {
    if (text == "all") return -1;
    std::string allowed = "0";
    if (text == "0") return 0;
    for (const ListedVersion &v : options.versions) {
        if (text == std::to_string(v.number)) return v.number;
        allowed += ", " + std::to_string(v.number);
    }
    refuse(EXIT_BAD_INPUT, "version '%s' is not one of %s, all (see --list)", text.c_str(), allowed.c_str());
}

// Refuses a file name that cannot be appended to. Does not create or change the file, since a run that is refused later
// must leave no trace.
inline void require_writable(const std::string &path) {
    struct stat status;
    if (path.back() == '/' || (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))) {
        refuse(EXIT_BAD_INPUT, "--json: '%s' is not the name of a file", path.c_str());
    }
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    const bool exists = access(path.c_str(), F_OK) == 0;
    const int descriptor = exists ? open(path.c_str(), O_WRONLY | O_APPEND) : -1;
    if (descriptor >= 0) close(descriptor);
    if (exists ? descriptor < 0 : access(folder.c_str(), W_OK) != 0) {
        refuse(EXIT_BAD_INPUT, "--json: cannot write '%s': %s", path.c_str(), strerror(errno));
    }
}

// The value of an option before the arguments are parsed, for programs whose table of versions depends on it. The value
// is not validated. If the option is repeated, the last one counts.
inline std::string early_value(int argc, char **argv, const std::string &option, std::string value) {
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument == option && i + 1 < argc) value = argv[i + 1];
        if (argument.compare(0, option.size() + 1, option + "=") == 0) value = argument.substr(option.size() + 1);
    }
    return value;
}

// Reads the arguments one after the other into the options.
class Parser {
  public:
    Parser(Options &own, int count, char **values) : options(own), argc(count), argv(values) {}

    void parse() {
        for (i = 1; i < argc; i++) {
            split(argv[i]);
            if (parse_own_option() || parse_common_option()) continue;
            if (option[0] == '-') refuse(EXIT_BAD_INPUT, "unknown option '%s' (see --help)", option.c_str());
            if (version_given) {
                refuse(EXIT_BAD_INPUT, "a second version, '%s': give one, or all", option.c_str());
            }
            version_given = true;
            options.version = parse_version(options, option);
        }
        if (!options.do_check && !options.do_bench) {
            refuse(EXIT_BAD_INPUT, "--check and --bench exclude each other: give one, or neither");
        }
        const std::string &path = options.json_path;
        if (path.empty() || path == "-") return;
        if (options.list) {
            refuse(EXIT_BAD_INPUT, "--json: '%s' is not allowed with --list; only - is, for standard output",
                   path.c_str());
        }
        require_writable(path);
    }

  private:
    Options &options;
    const int argc;
    char **const argv;
    int i = 1;                           // the current argument
    std::string option;                  // its option: --dtype of --dtype=fp32, -c of -c64 or -c=64
    const char *joined_value = nullptr;  // the value that is joined to it; null if there is none
    bool version_given = false;

    void split(const char *text) {
        const char *const equals = strchr(text, '=');
        option = text;
        joined_value = nullptr;
        if (strncmp(text, "--", 2) == 0) {
            if (equals) option.assign(text, equals);
            if (equals) joined_value = equals + 1;
            return;
        }
        const bool is_dim = text[0] == '-' && std::any_of(options.dims.begin(), options.dims.end(),
                                                          [&](const Dim &d) { return d.flag == text[1]; });
        if (is_dim && (equals == text + 2 || (text[2] != '\0' && strchr("+-0123456789", text[2])))) {
            option.assign(text, 2);
            joined_value = equals == text + 2 ? equals + 1 : text + 2;
        }
    }

    // The option's value: joined to it, or the next argument.
    const char *value() {
        if (joined_value) return joined_value;
        if (i + 1 >= argc) refuse(EXIT_BAD_INPUT, "%s needs a value (see --help)", option.c_str());
        return argv[++i];
    }

    // Whether the option has this name. Refuses a value, since the option takes none.
    bool is_flag(const char *flag) {
        if (option != flag) return false;
        if (joined_value) refuse(EXIT_BAD_INPUT, "'%s': %s takes no value", argv[i], flag);
        return true;
    }

    // The options that this program declares.
    bool parse_own_option() {
        for (Dim &d : options.dims) {
            if (option != std::string("-") + d.flag) continue;
            d.value = (int)parse_integer(option, value(), 1, INT32_MAX);
            return true;
        }
        for (Choice &c : options.choices) {
            if (option != c.option) continue;
            c.chosen = c.values.empty() ? is_flag(c.option) : parse_choice(option, c.values, value());
            return true;
        }
        for (Number &n : options.numbers) {
            if (option != n.option) continue;
            n.value = parse_number(n, value());
            return true;
        }
        for (Text &t : options.texts) {
            if (option != t.option) continue;
            t.value = value();
            return true;
        }
        return false;
    }

    // The options that every program has.
    bool parse_common_option() {
        if (option == "--dtype") {
            const std::vector<const char *> types = {"fp32", "fp16", "bf16"};
            options.dtype = types[parse_choice(option, types, value())];
        } else if (option == "--tokens") {
            options.token_source = value();
        } else if (option == "--block-size" && options.has_block_size) {
            options.block_size = (int)parse_integer(option, value(), 32, 1024);
            if (options.block_size % 32 != 0) {
                refuse(EXIT_BAD_INPUT, "--block-size: '%d' is not a multiple of 32 from 32 to 1024",
                       options.block_size);
            }
        } else if (option == "--repeat") {
            options.repeat = (int)parse_integer(option, value(), 1, 1000000);
        } else if (option == "--seed") {
            options.seed = (uint64_t)parse_integer(option, value(), 0, INT64_MAX);
        } else if (option == "--json") {
            options.json_path = value();
            const char *const path = options.json_path.c_str();
            if (*path == '\0') refuse(EXIT_BAD_INPUT, "--json: '' is not the name of a file");
            if (strncmp(path, "--", 2) == 0) {
                refuse(EXIT_BAD_INPUT, "--json: '%s' is an option, not the name of a file (./%s would be)", path, path);
            }
        } else if (is_flag("--check")) {
            options.do_bench = false;
        } else if (is_flag("--bench")) {
            options.do_check = false;
        } else if (is_flag("--brief")) {
            options.brief = true;
        } else if (is_flag("--list")) {
            options.list = true;
        } else if (is_flag("--help") || is_flag("-h")) {
            print_help(options);
            exit(finish(EXIT_OK));
        } else {
            return false;
        }
        return true;
    }
};

}  // namespace bookends
